"""Tests of the OpenAI-compatible endpoint: its requests and refusals, its rounds, keys and limits, and its end."""

import http.client
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from documents import blocks
from scripted_tools import tool_tokenizer
from seeded_engine import NAME, SeededEngine

from grpo_ray.config.loader import load_config
from grpo_ray.data.problem import Problem
from grpo_ray.errors import RolloutError
from grpo_ray.inference import chat_requests, endpoint
from grpo_ray.inference.chat_requests import RefusedRequest, read_chat_request, require_continuation
from grpo_ray.inference.rollout_function import FunctionSampler, RolloutPolicy
from grpo_ray.inference.trajectories import EndpointAccess, RolloutRow, Trajectory
from grpo_ray.tools.conversation import Conversation

PATH = "grpo_ray.inference.rollout_examples:one_turn"
SAMPLING = {"temperature": 1.0, "max_tokens": 48, "logprobs": 0}
AGAIN = {"role": "user", "content": "Again."}
Messages = list[dict[str, Any]]


class Client:
    """Client that uses address and key only."""

    def __init__(self, access: EndpointAccess, key: str | None = None) -> None:
        self.http = httpx.Client(
            base_url=access.base_url, headers={"Authorization": f"Bearer {key or access.api_key}"}, timeout=60
        )

    def post(self, messages: Any, **fields: Any) -> httpx.Response:
        return self.http.post("/chat/completions", json={"model": "policy", "messages": messages, **fields})

    def ask(self, messages: Messages, **fields: Any) -> Messages:
        """Return the messages with the policy's answer."""
        response = self.post(messages, **fields)
        assert response.status_code == 200, response.text
        return [*messages, response.json()["choices"][0]["message"]]


def row_dicts(numbers: tuple[int, ...], group: int = 2) -> list[dict[str, Any]]:
    problems = [
        Problem(id=f"{n:016x}", prompt=[{"role": "user", "content": f"What is {n} + 2?"}], solution=f"${n + 2}$")
        for n in numbers
    ]
    return [each.as_row(epoch=3, index=index) for each in problems for index in range(group)]


def sample(
    function: Callable[[list[RolloutRow], RolloutPolicy], list[Trajectory]],
    *overrides: str,
    engine: SeededEngine | None = None,
    numbers: tuple[int, ...] = (1, 2),
    sampling: Mapping[str, Any] = SAMPLING,
    **options: Any,
) -> tuple[list[Conversation], SeededEngine]:
    config = load_config(None, [f"rollout.function={PATH}", "grpo.max_completion_length=48", *overrides])
    sampler = FunctionSampler(config, tool_tokenizer(NAME), max_model_len=96, vocabulary_size=384)
    sampler.function = function
    engine = engine or SeededEngine()
    return sampler.sample(row_dicts(numbers), sampling, engine, **options), engine


def run(program: endpoint.Program, *overrides: str, **options: Any) -> tuple[list[Conversation], SeededEngine]:
    return sample(lambda rows, policy: policy.run_programs(rows, program), *overrides, **options)


def talk(access: EndpointAccess) -> None:
    """Take up to three turns, depending on the answers."""
    client = Client(access)
    messages = client.ask(list(access.row.prompt))
    while len(messages) < 6 and len(messages[-1]["content"]) % 3:
        response = client.post([*messages, AGAIN])
        if response.status_code == 400:
            assert response.json()["error"]["code"] == "context_length_exceeded"
            return
        messages += [AGAIN, response.json()["choices"][0]["message"]]


def talk_directly(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
    """Do the same as `talk` with the policy itself."""
    trajectories = active = policy.start(rows)
    policy.turn(active)
    for _ in range(2):
        active = [
            each
            for each in active
            if len(policy.tokenizer.decode(each.token_ids[last_start(each) :], skip_special_tokens=True)) % 3
            and policy.respond(each, "Again.")
        ]
        policy.turn(active)
    return trajectories


def last_start(trajectory: Trajectory) -> int:
    """Return where the policy's last turn begins."""
    return len(trajectory.mask) - trajectory.mask[::-1].index(0) if 0 in trajectory.mask else 0


def fields_of(conversations: list[Conversation]) -> list[dict[str, Any]]:
    return [vars(each) for each in conversations]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Assert that no thread of an endpoint lives on."""
    yield
    left = [each.name for each in threading.enumerate() if each.name.startswith("rollout-")]
    assert left == []


# Trajectories


def test_program_samples_what_a_function_with_the_policy_does() -> None:
    ours, engine = run(talk, numbers=(1, 2, 3, 4))
    expected, direct = sample(talk_directly, numbers=(1, 2, 3, 4))
    assert fields_of(ours) == fields_of(expected)
    assert engine.calls == direct.calls  # rounds of the same requests, in the same order
    assert {each.turns for each in ours} == {1, 2, 3} and {each.ended for each in ours} == {"stop"}


@pytest.mark.parametrize("slow", [lambda row: row.index, lambda row: 1 - row.index], ids=["last", "first"])
def test_result_does_not_depend_on_the_order_of_arrival(slow: Callable[[RolloutRow], int]) -> None:
    def late(access: EndpointAccess) -> None:
        time.sleep(0.1 * slow(access.row))
        talk(access)

    ours, engine = run(late)
    expected, other = run(talk)
    assert fields_of(ours) == fields_of(expected) and engine.calls == other.calls


@pytest.mark.long
def test_no_more_programs_run_at_once_than_the_limit() -> None:
    active, most = [0], [0]

    def counted(access: EndpointAccess) -> None:
        active[0] += 1
        most[0] = max(most[0], active[0])
        talk(access)
        active[0] -= 1

    ours, engine = run(counted, "rollout.max_active=3", numbers=(1, 2, 3, 4))
    again, other = run(talk, "rollout.max_active=3", numbers=(1, 2, 3, 4))
    expected, _ = run(talk, numbers=(1, 2, 3, 4))
    assert fields_of(ours) == fields_of(again) == fields_of(expected) and engine.calls == other.calls
    assert most == [3] and max(len(prompts) for prompts, _ in engine.calls) == 3


def test_tokens_are_those_that_the_engine_sampled() -> None:
    """Another tokenization of the texts would be shorter: the engine writes one token for each character."""
    given: list[list[int]] = []

    class Recorder(SeededEngine):
        def complete(self, prompt: list[int], options: dict[str, Any]) -> Any:
            completion = super().complete(prompt, options)
            given.append(completion.token_ids)
            return completion

    [first, _], engine = run(talk, engine=Recorder(), numbers=(2,))
    own = [token for token, is_own in zip(first.token_ids, first.own, strict=True) if is_own]
    assert own == [
        token for ids, (prompts, _) in zip(given[::2], engine.calls, strict=True) if prompts for token in ids
    ]
    for prompts, _ in engine.calls:  # each request's prompt begins with all tokens before it
        assert (first.prompt_ids + first.token_ids)[: len(prompts[0])] == prompts[0]


def test_first_request_determines_the_prompt() -> None:
    rules = {"role": "system", "content": "Be brief."}

    def program(access: EndpointAccess) -> None:
        text = [{"type": "text", "text": "What"}, {"type": "text", "text": "?"}]
        Client(access).ask([rules, {"role": "user", "content": text}])

    [first, *_], engine = run(program)
    assert (
        tool_tokenizer(NAME).decode(first.prompt_ids) == "<|system|>Be brief.<|end|><|user|>What?<|end|><|assistant|>"
    )
    assert engine.calls[0][0][0] == first.prompt_ids


def test_answer_has_the_form_of_openai() -> None:
    answers: list[dict[str, Any]] = []

    def program(access: EndpointAccess) -> None:
        models = httpx.get(access.base_url + "/models", headers={"Authorization": f"bearer {access.api_key}"}).json()
        assert [each["id"] for each in models["data"]] == ["policy"]
        answers.append(Client(access).post(access.row.prompt, max_tokens=2).json())

    [first, *_], engine = run(program)
    assert {each["max_tokens"] for each in engine.requests} == {2}
    [answer, *_] = sorted(answers, key=lambda each: each["id"])
    assert answer["id"] == "chatcmpl-0000000000000001-3-0-1" and answer["object"] == "chat.completion"
    [choice] = answer["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["role"] == "assistant"
    prompt = len(first.prompt_ids)
    assert answer["usage"] == {"prompt_tokens": prompt, "completion_tokens": 2, "total_tokens": prompt + 2}


def test_clients_of_openai_are_understood() -> None:
    openai = pytest.importorskip("openai")

    def program(access: EndpointAccess) -> None:
        client = openai.OpenAI(base_url=access.base_url, api_key=access.api_key)
        messages: Messages = list(access.row.prompt)
        for turn in range(2):
            answer = client.chat.completions.create(model="policy", messages=messages, max_tokens=20, temperature=1.0)
            messages += [answer.choices[0].message.model_dump(), AGAIN]  # with fields that are not set
            assert answer.id.endswith(f"-{turn + 1}")
        with pytest.raises(openai.BadRequestError, match=r"temperature=0\.5 is refused"):
            client.chat.completions.create(model="policy", messages=messages, temperature=0.5)

    conversations, _ = run(program)
    assert {each.turns for each in conversations} == {2}


def test_program_sets_reward_columns_and_failure() -> None:
    def program(access: EndpointAccess) -> None:
        Client(access).ask(list(access.row.prompt))
        access.trajectory.reward, access.trajectory.columns = access.row.index / 2, {"steps": 1}
        access.trajectory.failed = access.row.index == 1

    conversations, _ = run(program, "rewards.functions=[environment]")
    assert [(each.reward, each.ended) for each in conversations] == [(0, "stop"), (None, "tool")] * 2


# Refusals

REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "temperature": ({"temperature": 0.7}, "temperature", "the run samples with 1.0"),
    "top_p": ({"top_p": 0.9}, "top_p", "the run samples with 1.0"),
    "top_k": ({"top_k": 5}, "top_k", "the run samples with 0"),
    "penalty": ({"presence_penalty": 0.5}, "presence_penalty", "the run samples with 0.0"),
    "bias": ({"logit_bias": {"5": 1}}, "logit_bias", "the run samples with {}"),
    "stop": ({"stop": ["\n"]}, "stop", "the run samples with"),
    "seed": ({"seed": 0}, "seed", "the seed follows from"),
    "n": ({"n": 2}, "n", "one completion"),
    "stream": ({"stream": True}, "stream", "not streamed"),
    "logprobs": ({"logprobs": True}, "logprobs", "the trajectory has"),
    "grammar": ({"response_format": {"type": "json_object"}}, "response_format", "a grammar"),
    "tools": ({"tools": [{"type": "function"}]}, "tools", "tool calls are not parsed"),
    "unknown": ({"best_of": 3}, "best_of", "is not a field"),
    "model": ({"model": "gpt-5"}, "model", "the only model is 'policy'"),
    "no tokens": ({"max_tokens": 0}, "max_tokens", "at least 1"),
    "true tokens": ({"max_completion_tokens": True}, "max_completion_tokens", "whole number"),
    "no messages": ({"messages": []}, "messages", "at least one"),
    "text": ({"messages": "Hello"}, "messages", "must be a list"),
    "role": ({"messages": [{"role": "tool", "content": "5"}]}, "messages[0].role", "must be one of system"),
    "last role": ({"messages": [{"role": "assistant", "content": "5"}]}, "messages", "must have the role user"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "be text"),
    "number": ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "must be text"),
    "surrogate": ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages[0].content", "surrogate"),
    "name": ({"messages": [{"role": "user", "content": "5", "name": "x"}]}, "messages[0]", "name is refused"),
}


@pytest.mark.parametrize(("fields", "param", "message"), REFUSED.values(), ids=REFUSED)
def test_field_that_cannot_be_obeyed_is_refused_by_name(fields: dict[str, Any], param: str, message: str) -> None:
    body = {"model": "policy", "messages": [{"role": "user", "content": "5"}], **fields}
    with pytest.raises(RefusedRequest) as refused:
        read_chat_request(json.dumps(body).encode(), SAMPLING)
    error = refused.value.body["error"]
    assert error["param"] == param and message in error["message"] and error["type"] == "invalid_request_error"
    assert refused.value.status == (404 if param == "model" else 400)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"5", b"\xff", b"[" * 100_000])
def test_malformed_body_is_refused(body: bytes) -> None:
    with pytest.raises(RefusedRequest, match="the body"):
        read_chat_request(body, SAMPLING)


def test_fields_of_the_runs_own_values_and_unset_ones_are_taken() -> None:
    body = {
        "model": "policy", "messages": [AGAIN], "temperature": 0.8, "top_p": 0.9, "n": 1, "stream": False,
        "stop": None, "tools": [], "logit_bias": {}, "seed": None, "logprobs": False, "user": "me",
        "response_format": {"type": "text"}, "max_tokens": 9, "max_completion_tokens": 7,
    }  # fmt: skip
    request = read_chat_request(json.dumps(body).encode(), {"temperature": 0.8, "top_p": 0.9, "max_tokens": 24})
    assert (request.messages, request.max_tokens) == ([AGAIN], 7)


HISTORY = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2\n"}]
EDITED = {
    "repeated": (HISTORY[:1], r"messages must be the 2 .* got 1"),
    "edited": ([{"role": "user", "content": "one"}, HISTORY[1], AGAIN], r"messages\[0\] differs from the last request"),
    "answer edited": ([HISTORY[0], {"role": "assistant", "content": "3"}, AGAIN], r"messages\[1\] differs from"),
    "answer dropped": ([HISTORY[0], AGAIN], r"messages\[1\] differs from the last request"),
    "space of the user": ([{"role": "user", "content": "1 "}, HISTORY[1], AGAIN], r"messages\[0\] differs from"),
    "two more": ([*HISTORY, AGAIN, AGAIN], r"one of the role user after them; got 4"),
    "system": ([*HISTORY, {"role": "system", "content": "-"}], "one of the role user after them"),
}


@pytest.mark.parametrize(("messages", "message"), EDITED.values(), ids=EDITED)
def test_history_that_is_not_continued_is_refused(messages: Messages, message: str) -> None:
    with pytest.raises(RefusedRequest, match=message):
        require_continuation(messages, HISTORY)


def test_white_space_around_an_answer_may_be_stripped() -> None:
    assert require_continuation([HISTORY[0], {"role": "assistant", "content": "2"}, AGAIN], HISTORY) == AGAIN


def test_refused_request_leaves_trajectory_and_seeds_as_they_are() -> None:
    def program(access: EndpointAccess) -> None:
        client = Client(access)
        assert client.post(access.row.prompt, temperature=0.1).status_code == 400
        assert (
            client.post([{"role": "user", "content": "long " * 100}]).json()["error"]["code"] == chat_requests.TOO_LONG
        )
        messages = client.ask(list(access.row.prompt))
        for spoilt in ([AGAIN], messages[:1], [messages[0], {"role": "assistant", "content": "-"}, AGAIN]):
            assert client.post(spoilt).status_code == 400
        client.ask([*messages, AGAIN])

    def plain(access: EndpointAccess) -> None:
        client = Client(access)
        client.ask([*client.ask(list(access.row.prompt)), AGAIN])

    assert fields_of(run(program)[0]) == fields_of(run(plain)[0])


def test_turn_that_was_cut_off_cannot_be_continued() -> None:
    def program(access: EndpointAccess) -> None:
        client = Client(access)
        messages = client.ask(list(access.row.prompt), max_tokens=1)
        response = client.post([*messages, AGAIN])
        assert response.status_code == 400 and response.json()["error"]["code"] == chat_requests.TOO_LONG

    assert {each.ended for each in run(program)[0]} == {"length"}


def test_second_request_of_a_row_at_the_same_time_is_refused() -> None:
    statuses: list[int] = []

    def program(access: EndpointAccess) -> None:
        if access.row.index == 0:  # the other row's program keeps the round from beginning
            both = [threading.Thread(target=lambda: statuses.append(Client(access).post(access.row.prompt).status_code))
                    for _ in range(2)]  # fmt: skip
            for each in both:
                each.start()
            for each in both:
                each.join()
        else:
            while not statuses:
                time.sleep(0.01)
            Client(access).ask(list(access.row.prompt))

    run(program, numbers=(1,))
    assert statuses == [400, 200]


# Keys and limits


def test_requests_without_the_key_are_refused_before_their_body_is_read() -> None:
    seen: list[int] = []

    def program(access: EndpointAccess) -> None:
        Client(access).ask(list(access.row.prompt))
        for headers in ({}, {"Authorization": f"Basic {access.api_key}"}, {"Authorization": "Bearer " + "x" * 43}):
            seen.append(httpx.get(access.base_url + "/models", headers=headers).status_code)
            connection = http.client.HTTPConnection(access.base_url.split("/")[2])
            connection.putrequest("POST", "/v1/chat/completions")
            connection.putheader("Content-Length", "1000000")  # never sent
            for header in headers.items():
                connection.putheader(*header)
            connection.endheaders()
            response = connection.getresponse()
            assert json.load(response)["error"]["code"] == "invalid_api_key"
            seen.append(response.status)
            connection.close()

    run(program, numbers=(1,))
    assert seen == [401] * 12


def test_keys_differ_and_none_is_shown() -> None:
    accesses: list[EndpointAccess] = []

    def program(access: EndpointAccess) -> None:
        accesses.append(access)
        Client(access).ask(list(access.row.prompt))

    run(program)
    assert len({each.api_key for each in accesses}) == 4 and all(len(each.api_key) == 43 for each in accesses)
    assert accesses[0].api_key not in repr(accesses[0]) and accesses[0].base_url.startswith("http://127.0.0.1:")


def test_key_of_another_row_writes_into_that_rows_trajectory_only() -> None:
    """Every program of a step has the same address: the key alone decides."""
    accesses: dict[int, EndpointAccess] = {}

    def program(access: EndpointAccess) -> None:
        accesses[access.row.index] = access
        Client(access).ask(list(access.row.prompt))
        if access.row.index == 0:
            while len(accesses) < 2:
                time.sleep(0.01)
            assert accesses[1].base_url == access.base_url
            assert Client(access, accesses[1].api_key).post(access.row.prompt).status_code in (400, 410)

    assert {each.turns for each in run(program, numbers=(1,))[0]} == {1}


def test_large_body_and_unknown_paths_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "MAX_BYTES", 2000)

    def program(access: EndpointAccess) -> None:
        client = Client(access)
        assert client.post([{"role": "user", "content": "x" * 2000}]).status_code == 413
        assert client.http.get("/nothing").status_code == 404
        assert client.http.get("/chat/completions").json()["error"]["message"] == "Method Not Allowed"
        client.ask(list(access.row.prompt))

    run(program)


def test_body_that_does_not_arrive_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "READ_SECONDS", 0.1)

    def program(access: EndpointAccess) -> None:
        connection = http.client.HTTPConnection(access.base_url.split("/")[2])
        connection.putrequest("POST", "/v1/chat/completions")
        connection.putheader("Content-Length", "100")
        connection.putheader("Authorization", f"Bearer {access.api_key}")
        connection.endheaders()
        assert connection.getresponse().status == 408
        connection.close()
        Client(access).ask(list(access.row.prompt))

    run(program)


def test_connections_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "CONNECTIONS", 2)  # 2 * (2 + 2)

    def program(access: EndpointAccess) -> None:
        client = Client(access)
        client.ask(list(access.row.prompt))
        if access.row.index == 0:
            host, port = access.base_url.split("/")[2].split(":")
            idle = [socket.create_connection((host, int(port))) for _ in range(8)]
            time.sleep(0.2)
            assert httpx.get(access.base_url + "/models").status_code == 503
            for each in idle:
                each.close()

    run(program, numbers=(1,))


# Ends


def test_port_and_threads_end_with_the_call() -> None:
    accesses: list[EndpointAccess] = []

    def program(access: EndpointAccess) -> None:
        accesses.append(access)
        Client(access).ask(list(access.row.prompt))  # and leaves its connection open

    run(program)
    with pytest.raises(httpx.ConnectError):
        httpx.get(accesses[0].base_url + "/models")


def test_failed_program_ends_the_others_and_is_raised() -> None:
    statuses: list[int] = []

    def program(access: EndpointAccess) -> None:
        if access.row.index == 1:
            raise KeyError(f"row {access.row.id[-1]}")
        statuses.append(Client(access).post(access.row.prompt).status_code)

    for _ in range(3):
        with pytest.raises(KeyError, match="row 1"):  # the first row's, whichever has failed first
            run(program)
    assert statuses == [410] * 6


def test_programs_do_not_start_after_a_failure() -> None:
    started: list[int] = []

    def program(access: EndpointAccess) -> None:
        started.append(access.row.index)
        if len(started) == 2:
            raise KeyError("second")
        talk(access)

    with pytest.raises(KeyError, match="second"):
        run(program, "rollout.max_active=1", numbers=(1, 2, 3, 4))
    assert len(started) <= 3  # the next one has started when the failure is found


def test_failure_of_the_engine_is_raised_and_answered() -> None:
    statuses: list[int] = []

    class Broken(SeededEngine):
        def complete(self, prompt: list[int], options: dict[str, Any]) -> Any:
            raise RuntimeError("no engine")

    with pytest.raises(RuntimeError, match="no engine"):
        run(lambda access: statuses.append(Client(access).post(access.row.prompt).status_code), engine=Broken())
    assert statuses == [410] * 4


def test_program_that_has_given_up_on_a_request_gets_no_turn() -> None:
    def program(access: EndpointAccess) -> None:
        if access.row.index:
            time.sleep(0.5)
        elif access.row.id.endswith("1"):
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    access.base_url + "/chat/completions",
                    json={"model": "policy", "messages": access.row.prompt},
                    headers={"Authorization": f"Bearer {access.api_key}"},
                    timeout=0.2,
                )
            return
        Client(access).ask(list(access.row.prompt))

    with pytest.raises(RolloutError, match=r"row 0 \(problem 0{15}1, .*no token is the policy's own"):
        run(program)


@pytest.mark.long
def test_client_that_sends_half_a_request_does_not_keep_the_endpoint_open() -> None:
    kept: list[socket.socket] = []

    def program(access: EndpointAccess) -> None:
        host, port = access.base_url.split("/")[2].split(":")
        kept.append(socket.create_connection((host, int(port))))
        kept[-1].sendall(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
            + f"Authorization: Bearer {access.api_key}\r\n\r\n{{".encode()
        )
        Client(access).ask(list(access.row.prompt))

    start = time.monotonic()
    run(program, numbers=(1,))
    assert time.monotonic() - start < 10
    for each in kept:
        each.settimeout(5)
        while each.recv(1000):  # until the endpoint has closed it
            pass
        each.close()


WRONG_ROWS = {
    "twice": (lambda rows: [rows[0], *rows], "run_programs got a row twice"),
    "another call's": (
        lambda rows: [RolloutRow(prompt=[], solution="", id="0", epoch=0, index=0, seed=0, group_seed=0)],
        "run_programs got a row that the function was not called with",
    ),
}


@pytest.mark.parametrize(("rows_of", "message"), WRONG_ROWS.values(), ids=WRONG_ROWS)
def test_rows_that_cannot_have_a_program_are_refused(rows_of: Any, message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        sample(lambda rows, policy: policy.run_programs(rows_of(rows), talk))


def test_no_rows_need_no_endpoint() -> None:
    def function(rows: list[RolloutRow], policy: RolloutPolicy) -> list[Trajectory]:
        assert policy.run_programs([], talk) == []
        return policy.run_programs(rows, talk)

    assert fields_of(sample(function)[0]) == fields_of(run(talk)[0])


def test_requests_are_progress() -> None:
    progress: list[int] = []
    run(talk, on_result=lambda: progress.append(1))
    assert len(progress) > 8


def test_server_is_not_imported_before_it_is_used() -> None:
    code = (
        "import sys, grpo_ray.inference.rollout_examples, grpo_ray\n"
        "grpo_ray.RolloutPolicy, grpo_ray.EndpointAccess\n"
        "assert not {'starlette', 'uvicorn'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Examples


def test_example_program_samples_what_the_second_try_does() -> None:
    from grpo_ray.inference.rollout_examples import external_program, second_try

    ours, engine = sample(external_program, numbers=(1,))
    expected, direct = sample(second_try, numbers=(1,))
    assert fields_of(ours) == fields_of(expected) and engine.calls == direct.calls
    assert {each.turns for each in ours} == {2}


def test_example_program_that_fails_costs_the_reward(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    from grpo_ray.inference import rollout_examples

    program = tmp_path / "failing.py"
    program.write_text("import sys; sys.exit(3)")
    monkeypatch.setattr(rollout_examples, "PROGRAM", program)
    conversations, _ = sample(rollout_examples.external_program, numbers=(1,))
    assert [each.ended for each in conversations] == ["tool", "tool"]


def test_function_of_the_documents_runs_its_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    """Run `agents` with a program `my-agent` that makes two requests, and with one that fails at once."""
    page = [block for block in blocks("python") if block.source == "docs/tools-and-environments.md"]
    [block] = [block for block in page if "def agents(rows" in block.text]
    module: dict[str, Any] = {}
    exec(block.text, module)  # what a reader writes into a module
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "my-agent"
    example = (
        "import example_program as agent, sys\nagent.main({'prompt': [{'role': 'user', 'content': sys.stdin.read()}]"
    )
    folder = Path(endpoint.__file__).parent
    program.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(folder)!r})\n{example}, 'solution': '-'}})"
    )
    program.chmod(0o755)
    assert {each.turns for each in sample(module["agents"], numbers=(1,))[0]} == {2}
    program.write_text("#!/bin/sh\nexit 1")
    assert {(each.turns, each.ended) for each in sample(module["agents"], numbers=(1,))[0]} == {(1, "tool")}
