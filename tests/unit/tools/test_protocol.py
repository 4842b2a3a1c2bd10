"""Tests of the sandbox's messages: framing, and results that a hostile process may send."""

import json
import socket
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_ray.processes.messages import LENGTH, frame
from grpo_ray.tools.sandbox.protocol import (
    MAX_BYTES,
    MAX_RESULT_CHARS,
    CallResult,
    cut_middle,
    pack,
    receive,
    receive_first,
    result_of,
    result_to_json,
    unpack,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


# Framing


@given(messages=st.lists(st.dictionaries(st.text(), st.integers() | st.text()), max_size=4), size=st.integers(1, 9))
def test_unpack_of_pieces_yields_the_messages(messages: list[Any], size: int) -> None:
    data = b"".join(pack(message) for message in messages)
    buffer = bytearray()
    unpacked: list[Any] = []
    for start in range(0, len(data), size):
        buffer += data[start : start + size]
        unpacked += unpack(buffer)
    assert unpacked == messages and not buffer


def test_unpack_keeps_an_incomplete_message() -> None:
    whole, part = pack({"a": 1}), pack({"b": 2})[:-1]
    buffer = bytearray(whole + part)
    assert list(unpack(buffer)) == [{"a": 1}]
    assert buffer == part


@pytest.mark.parametrize("data", [b"", b"{", b"[1]", b"null", b'"text"', b"\xff\xfe", b"{} {}", b'{"a":' + b"9" * 5000])
def test_unpack_of_malformed_data_raises_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        list(unpack(bytearray(frame(data))))


def test_unpack_refuses_a_size_before_the_data_arrives() -> None:
    assert list(unpack(bytearray(LENGTH.pack(MAX_BYTES)), MAX_BYTES)) == []
    with pytest.raises(ValueError, match=f"a message of {MAX_BYTES + 1} bytes"):
        list(unpack(bytearray(LENGTH.pack(MAX_BYTES + 1)), MAX_BYTES))


def test_unpack_of_a_trusted_sender_has_no_limit() -> None:
    (message,) = unpack(bytearray(pack({"text": "x" * (MAX_BYTES + 1)})))
    assert len(message["text"]) == MAX_BYTES + 1


def test_unpack_yields_the_messages_before_a_malformed_one() -> None:
    messages = unpack(bytearray(pack({"a": 1}) + frame(b"junk!")))
    assert next(messages) == {"a": 1}
    with pytest.raises(ValueError):
        next(messages)


def test_pack_turns_other_values_into_text() -> None:
    assert list(unpack(bytearray(pack({"at": {3}})))) == [{"at": "{3}"}]


def test_receive_first_leaves_later_messages() -> None:
    near, far = socket.socketpair()
    with near, far:
        near.sendall(pack({"first": "x" * 100_000}) + pack({"second": 2}) + pack({"third": 3}))
        near.shutdown(socket.SHUT_WR)
        assert receive_first(far) == {"first": "x" * 100_000}
        assert list(receive(far)) == [{"second": 2}, {"third": 3}]


@pytest.mark.parametrize("sent", [b"", b"\x05\x00", pack({"a": 1})[:-1]])
def test_receive_first_of_a_closed_socket_raises(sent: bytes) -> None:
    near, far = socket.socketpair()
    with far:
        with near:
            near.sendall(sent)
        with pytest.raises(ConnectionError):
            receive_first(far)


# Results


def test_result_of_a_result_gives_it_back() -> None:
    result = CallResult("timeout", "late", 0.5, True, 1.25)
    assert result_of(result_to_json(result), 1.25) == result


def test_result_of_an_empty_message_is_an_error() -> None:
    assert result_of({}, 0.12345678) == CallResult("error", seconds=0.123457)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), True, False, "1", [1.0], {}, None])
def test_result_of_a_value_that_is_no_number_has_none(value: Any) -> None:
    assert result_of({"status": "ok", "value": value}, 0.0).value is None


@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["positive", "negative"])
def test_result_of_an_integer_beyond_floats_has_no_value(value: int) -> None:
    message = next(unpack(bytearray(pack({"status": "ok", "value": value}))))
    assert result_of(message, 0.0).value is None


@pytest.mark.parametrize(("value", "expected"), [(0, 0.0), (0.0, 0.0), (-2, -2.0), (1e308, 1e308)])
def test_result_of_a_number_has_its_value(value: float, expected: float) -> None:
    result = result_of({"status": "ok", "value": value}, 0.0)
    assert result.value == expected and isinstance(result.value, float)


@pytest.mark.parametrize("status", [None, 1, "", "OK", "unknown", ["ok"], {"ok": 1}])
def test_result_of_another_status_is_an_error(status: Any) -> None:
    assert result_of({"status": status}, 0.0).status == "error"


@pytest.mark.parametrize("text", [1, True, ["x"], {"text": "x"}, None])
def test_result_of_a_text_of_another_type_has_none(text: Any) -> None:
    assert result_of({"status": "ok", "text": text}, 0.0).text is None


@pytest.mark.parametrize("done", [1, "true", [True], None])
def test_result_of_done_needs_a_boolean(done: Any) -> None:
    assert not result_of({"status": "ok", "done": done}, 0.0).done
    assert result_of({"status": "ok", "done": True}, 0.0).done


@given(st.fixed_dictionaries({}, optional=dict.fromkeys(("status", "text", "value", "done", "seconds", "id"), JSON)))
def test_result_of_anything_is_a_result(message: Any) -> None:
    result = result_of(message, 2.0)
    assert result.seconds == 2.0 and isinstance(result.done, bool)
    assert json.loads(json.dumps(result_to_json(result), allow_nan=False)) == result_to_json(result)


# Length of results


@pytest.mark.parametrize("length", [0, 1, MAX_RESULT_CHARS])
def test_cut_middle_keeps_a_short_text(length: int) -> None:
    assert cut_middle("x" * length) == "x" * length


@pytest.mark.parametrize("extra", [1, 7, 10**6])
def test_cut_middle_counts_what_is_left_out(extra: int) -> None:
    text = "a" * (MAX_RESULT_CHARS // 2) + "b" * extra + "c" * (MAX_RESULT_CHARS // 2)
    cut = cut_middle(text)
    head, mark, tail = cut.partition(" [... ")
    number, words, tail = tail.partition(" characters omitted ...] ")
    assert mark and words and len(cut) <= MAX_RESULT_CHARS
    assert set(head) == {"a"} and set(tail) == {"c"} and abs(len(head) - len(tail)) <= 1
    assert int(number) == len(text) - len(head) - len(tail)


def test_cut_middle_of_a_cut_text_changes_nothing() -> None:
    """The episode's process cuts a result, and the supervisor cuts it again; the number left out must survive."""
    once = cut_middle("x" * 10**6)
    assert cut_middle(once) == once
    assert result_of({"status": "ok", "text": once}, 0.0).text == once
