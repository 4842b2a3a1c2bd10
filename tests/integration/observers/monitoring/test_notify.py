"""Tests of messages to a web address, with real HTTP servers that work, refuse, fail, and never respond."""

import dataclasses
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from webhook import webhook

from grpo_ray.config.loader import load_config
from grpo_ray.errors import TrainingError
from grpo_ray.observers.monitoring.notify import MAX_TEXT_CHARS, DeliveryLimits, Notifier

QUICK = DeliveryLimits(request_seconds=60.0, attempts=4, backoff_seconds=0.01, close_seconds=60.0, waiting=4)
"""Short pauses. Requests have time, since a response that comes too late is a second message."""
WARNING = {"event": "warning", "at": 5.0, "step": 3, "name": "no_signal", "what": "90 % of the groups; try this"}
SUMMARY = {"steps": 9, "stopped": None, "best_checkpoint": "runs/a/checkpoint-000009", "reward_last": float("nan")}


@contextmanager
def notifier(address: str, limits: DeliveryLimits = QUICK) -> Iterator[tuple[Notifier, list[str]]]:
    """Yield a notifier of a run of 9 steps, and the lines that it shows; closed at the end."""
    lines: list[str] = []
    config = load_config(None, ["run.name=night", "grpo.max_steps=9", f"run.notify={address}"])
    observer = Notifier(config, "/runs/night", lines.append, limits)
    try:
        yield observer, lines
    finally:
        observer.close()


def test_notify_posts_warning_with_what_is_known_so_far() -> None:
    with webhook() as server, notifier(server.address) as (observer, lines):
        observer.step({"step": 2, "reward/mean": 0.5, "heldout/accuracy": 0.25, "heldout/low": 0.2}, at=4.0)
        observer.step({"step": 3, "reward/mean": 0.625}, at=5.0)
        observer.event({"event": "notice", "at": 5.0, "what": "not posted"})
        observer.event(WARNING)
        (body,) = server.wait_for(1)
    assert lines == [] and server.paths == ["/services/s3cr3t-of-the-chat"]
    assert body == {
        "text": "night: warning at step 3 of 9; reward 0.625; held-out 0.250\n"
        "step 3: 90 % of the groups; try this (no_signal)",
        "event": "warning",
        "run": "night",
        "folder": "/runs/night",
        "at": 5.0,
        "step": 3,
        "max_steps": 9,
        "reward": 0.625,
        "heldout": {"heldout/accuracy": 0.25, "heldout/low": 0.2},
        "warning": "no_signal",
        "what": "step 3: 90 % of the groups; try this (no_signal)",
        "summary": None,
    }


def test_notify_posts_failures_and_ends() -> None:
    with webhook() as server:
        with notifier(server.address) as (observer, _):
            observer.event({"event": "failed", "at": 1.0, "rank": 1, "what": "it died"})
            server.wait_for(1)
            observer.aborted(TrainingError("the workers failed"))
            server.wait_for(2)
            observer.aborted(KeyboardInterrupt())
            server.wait_for(3)
            observer.finished(SUMMARY)
            server.wait_for(4)
            observer.finished({**SUMMARY, "stopped": "no_signal"})
        bodies = server.wait_for(5)
    assert [body["event"] for body in bodies] == ["worker_failed", "failed", "failed", "finished", "stopped"]
    assert [body["what"] for body in bodies] == [
        "worker 1: it died",
        "TrainingError: the workers failed",
        "interrupted",
        "best checkpoint: runs/a/checkpoint-000009",
        "stopped by no_signal",
    ]
    assert bodies[3]["summary"] == {**SUMMARY, "reward_last": None}  # JSON has no NaN
    assert bodies[3]["step"] == 9


def test_notify_server_fails_twice_message_arrives() -> None:
    with webhook(500, 503, 200) as server:
        with notifier(server.address) as (observer, lines):
            observer.event(WARNING)
        assert len(server.wait_for(3)) == 3 and lines == []


@pytest.mark.parametrize(
    ("status", "requests"),
    [(500, 4), (429, 4), (404, 1), (307, 1)],
    ids=["broken", "too many", "no such hook", "redirect"],
)
def test_notify_refused_message_is_given_up_with_one_line(status: int, requests: int) -> None:
    with webhook(status) as server:
        with notifier(server.address) as (observer, lines):
            observer.event(WARNING)
            server.wait_for(requests)
            observer.finished(SUMMARY)
        assert len(server.bodies) == 2 * requests and set(server.paths) == {"/services/s3cr3t-of-the-chat"}
    assert lines == [
        f"run.notify: a message was not delivered: the server responded {status}; further failures are not shown"
    ]


def test_notify_unreachable_server_shows_one_line_without_the_address() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound but not listening: connections are refused
        with notifier(f"http://127.0.0.1:{taken.getsockname()[1]}/s3cr3t") as (observer, lines):
            observer.event(WARNING)
            observer.finished(SUMMARY)
    assert len(lines) == 1 and "the server cannot be reached (Connection refused)" in lines[0]
    assert "s3cr3t" not in lines[0]


def test_notify_server_that_never_responds_delays_the_end_by_its_limit() -> None:
    limits = dataclasses.replace(QUICK, close_seconds=0.5)
    with webhook(0) as server, notifier(server.address, limits) as (observer, lines):
        observer.event(WARNING)
        server.wait_for(1)
        for step in range(1000):  # the run goes on
            observer.step({"step": step}, at=0.0)
            observer.event(WARNING)
        observer.finished(SUMMARY)
        begin = time.monotonic()
        observer.close()
        assert time.monotonic() - begin < 30  # limit 0.5 s, on a machine that may be busy
        assert lines == ["run.notify: the last message was not delivered within 0.5 seconds"]
        assert len(server.bodies) == 1


def test_notify_request_without_response_is_repeated() -> None:
    limits = dataclasses.replace(QUICK, request_seconds=0.1, attempts=2)
    with webhook(0) as server:
        with notifier(server.address, limits) as (observer, lines):
            observer.event(WARNING)
        assert len(server.wait_for(2)) == 2
    assert lines == [
        "run.notify: a message was not delivered: the server cannot be reached (TimeoutError); "
        "further failures are not shown"
    ]


def test_notify_server_without_http_is_given_up() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        limits = dataclasses.replace(QUICK, attempts=1)
        with notifier(f"http://127.0.0.1:{server.getsockname()[1]}", limits) as (observer, lines):
            observer.event(WARNING)
            connection, _ = server.accept()
            connection.recv(10)
            connection.sendall(b"SSH-2.0-x\r\n")
            connection.close()
    assert len(lines) == 1 and lines[0].startswith("run.notify: a message was not delivered: ")


def test_notify_end_of_run_comes_before_warnings_that_wait() -> None:
    """Four warnings are kept of 50, and at the end only the message about the end."""
    limits = dataclasses.replace(QUICK, backoff_seconds=60.0)
    with webhook(500, 200) as server:
        with notifier(server.address, limits) as (observer, lines):
            observer.event(WARNING)
            server.wait_for(1)  # its next attempt is due in 60 s
            for _ in range(50):
                observer.event(WARNING)
            observer.finished(SUMMARY)
        assert [body["event"] for body in server.bodies] == ["warning", "finished"]
    assert len(lines) == 1 and "the server responded 500" in lines[0]


def test_notify_untrusted_text_is_bounded_without_secrets_mentions_and_escapes() -> None:
    hostile = "<!channel> @everyone \x1b[31m hf_" + "a" * 30 + " " + "x" * 100_000
    with webhook() as server:
        with notifier(server.address) as (observer, _):
            observer.aborted(TrainingError(f"{hostile} {server.address}"))
        ((body,)) = server.wait_for(1)
    text = body["text"]
    assert not set("<>@\x1b") & set(text) and "hf_aaa" not in str(body) and "s3cr3t" not in str(body)
    assert len(text) < MAX_TEXT_CHARS + 300 and len(body["what"]) < MAX_TEXT_CHARS + 200


def test_notify_address_is_hidden_in_the_config() -> None:
    config = load_config(None, ["run.notify=https://hooks.example.org/services/T0/B0/s3cr3t"])
    assert "s3cr3t" not in repr(config)


def test_notify_without_messages_starts_no_thread() -> None:
    with notifier("http://127.0.0.1:9/") as (observer, lines):
        observer.resumed(0, [])
    assert lines == []
