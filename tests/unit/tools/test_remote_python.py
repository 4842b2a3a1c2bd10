"""Tests of the tool that runs Python code in a remote sandbox, with a server on this machine."""

import json
import random
import shutil
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sandbox_server import Answer, SandboxServer, answer, make_certificate, run_program, sandbox_server
from transformers.utils import get_json_schema

from grpo_ray.config.schema import RolloutConfig
from grpo_ray.errors import ConfigError
from grpo_ray.text.redaction import HIDDEN, redact
from grpo_ray.tools import python_tool, remote_python
from grpo_ray.tools.definitions import load_definition
from grpo_ray.tools.python_tool import END_BYTES
from grpo_ray.tools.remote.provider import Execution, Job, Service
from grpo_ray.tools.remote.sandbox import (
    ANSWER_SHARE,
    ATTEMPTS,
    CODE_SHARE,
    RemoteSandbox,
    RemoteSettings,
    sandbox_issue,
)
from grpo_ray.tools.sandbox.protocol import CallError, cut_middle

REMOTE = "grpo_ray.tools.remote_python:python"
LONG = 300.0
"""Time limit of tests in which it must not matter."""
TOKEN = "t0ken-of-the-sandbox"


class Clock:
    """Clock that only pauses move."""

    def __init__(self) -> None:
        self.seconds, self.pauses = 0.0, list[float]()

    def sleep(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.seconds += seconds

    def now(self) -> float:
        return self.seconds


@contextmanager
def sandbox(
    *answers: Answer, clock: Clock | None = None, **settings: Any
) -> Iterator[tuple[RemoteSandbox, SandboxServer]]:
    """Yield a sandbox whose service gives these answers; none: it runs programs. Pauses take no time."""
    clock = clock or Clock()
    given = {"provider": "sandbox_fusion", "time_limit": LONG, **settings}
    with sandbox_server(*answers, retry_after=given.pop("retry_after", None)) as server:
        yield RemoteSandbox(RemoteSettings(url=server.url, **given), clock.sleep, clock.now), server


def failure(used: RemoteSandbox, code: str = "1") -> tuple[str, str]:
    """Run code that fails; return status and text."""
    with pytest.raises(CallError) as raised:
        used.run(code, seed=0)
    return raised.value.status, raised.value.text


# The same tool


def test_remote_tool_is_described_like_the_local_one() -> None:
    assert get_json_schema(remote_python.python) == get_json_schema(python_tool.python)


def test_remote_and_local_tool_together_raise() -> None:
    both = RolloutConfig(tools=(REMOTE, "grpo_ray.tools.python_tool:python"), sandbox_url="http://localhost")
    with pytest.raises(ConfigError, match="two functions have the name 'python'"):
        load_definition(both)


@pytest.mark.parametrize(
    "code",
    [
        "print('a')\nx = 3\nx * 2", "x = 3", "", "print('é' + chr(0x1F600))", "input()", "a\0b",
        "import sys; sys.stdout.write('a') and sys.exit(3)", "import os; os.kill(os.getpid(), 11)", 
        "import sys\nfor i in '12':\n    print(i)\n    print(i * 2, file=sys.stderr)", "import random; random.random()",
        "print('before')\ndef half(x):\n    return x / 0\nhalf(4)", "import sys; sys.argv",
    ],
)  # fmt: skip
def test_remote_result_equals_the_local_one(code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    random.seed(5)
    local = python_tool.python(code)
    random.seed(5)
    with sandbox() as (used, _):
        assert used.run(code, random.getrandbits(32)) == local


def test_remote_long_output_is_bounded() -> None:
    with sandbox() as (used, _):
        output = used.run("for i in range(100_000):\n    print(i)", seed=0)  # 588,890 bytes
    assert output.startswith("0\n1\n") and output.endswith("99998\n99999\n")
    assert f"[... {588_890 - 2 * END_BYTES} bytes omitted ...]" in output
    assert cut_middle(output) == output


def test_response_above_the_limit_is_an_error_of_the_code() -> None:
    with sandbox(b" " * ((16 << 20) + 1)) as (used, _):
        assert failure(used) == ("error", "the output is too long")


def test_code_that_the_service_refuses_is_an_error_of_the_code() -> None:
    with sandbox(413) as (used, server):
        assert failure(used) == ("error", "the code is too long for the sandbox")
    assert len(server.requests) == 1


def test_request_has_code_and_limits_only() -> None:
    with sandbox(memory_bytes=3 << 30) as (used, server):
        used.run("'of the policy'", seed=0)
    (request,) = server.requests
    assert request.pop("code").endswith("main()\n")
    assert request == {
        "language": "python", "stdin": "'of the policy'", "run_timeout": CODE_SHARE * LONG, "memory_limit_MB": 3072,
    }  # fmt: skip
    assert server.authorizations == [None] and server.others == []


def test_lone_surrogates_in_code_are_replaced() -> None:
    with sandbox() as (used, _):
        assert used.run("'\ud800'", seed=0) == "'?'\n"


# Time


def test_code_beyond_its_time_is_a_timeout() -> None:
    with sandbox(lambda _: answer("Failed", "TimeLimitExceeded")) as (used, _):
        assert failure(used) == ("timeout", f"no result within {CODE_SHARE * LONG:g} s")


def test_endless_code_is_a_timeout() -> None:
    with sandbox(lambda request: run_program({**request, "run_timeout": 0.5})) as (used, _):
        assert failure(used, "while True: pass")[0] == "timeout"


def test_timeout_of_code_with_less_time_is_unreachable() -> None:
    """A pause took 120 of 300 s: the code got 90 s in place of 150, and it is unknown whether it would have ended."""
    late = answer("Failed", "TimeLimitExceeded")
    with sandbox(503, lambda _: late, retry_after="120") as (used, server):
        status, text = failure(used)
    assert status == "unreachable" and "it was busy, and left the code 90 s of 150" in text
    assert [each["run_timeout"] for each in server.requests] == pytest.approx([150, 90], abs=1)


@pytest.mark.long
@pytest.mark.parametrize("how", ["hang", "drip"])
def test_service_that_does_not_answer_is_unreachable(how: str) -> None:
    with sandbox(how, time_limit=1.0) as (used, server):
        status, text = failure(used)
    assert status == "unreachable" and f"no response within {ANSWER_SHARE:g} s" in text
    assert len(server.requests) <= 1  # none, if this machine was too busy to take it


# Attempts


@pytest.mark.parametrize("first", [429, 500, 502, 503, 504, "close", "cut"])
def test_temporary_failure_is_tried_again(first: Answer) -> None:
    clock = Clock()
    with sandbox(first, run_program, clock=clock) as (used, server):
        assert used.run("6 * 7", seed=0) == "42\n"
    assert len(server.requests) == 2 and len(clock.pauses) == 1


def test_failure_of_the_service_itself_is_tried_again() -> None:
    broken = answer("SandboxError", "Error", message="exception on running code")
    with sandbox(lambda _: broken, run_program) as (used, server):
        assert used.run("6 * 7", seed=0) == "42\n"
    assert len(server.requests) == 2


def test_attempts_are_limited_and_pauses_grow() -> None:
    clock = Clock()
    with sandbox(503, clock=clock) as (used, server):
        status, text = failure(used)
    assert (status, text) == ("unreachable", "the remote sandbox gave no result: it responded 503")
    assert len(server.requests) == ATTEMPTS == 4
    for pause, mean in zip(clock.pauses, (0.25, 0.5, 1.0), strict=True):
        assert 0.5 * mean <= pause <= 1.5 * mean


def test_pause_that_the_service_asks_for_is_made() -> None:
    clock = Clock()
    with sandbox(429, run_program, retry_after="60", clock=clock) as (used, _):
        used.run("1", seed=0)
    assert clock.pauses == [60]


@pytest.mark.parametrize("header", ["181", "3600", "1e400", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_pause_beyond_the_limit_is_not_made(header: str) -> None:
    clock = Clock()
    with sandbox(429, retry_after=header, clock=clock) as (used, server):
        assert failure(used)[0] == "unreachable"
    assert clock.seconds < LONG and len(server.requests) == (ATTEMPTS if clock.pauses else 1)


def test_pauses_do_not_take_random_numbers_of_the_completion() -> None:
    random.seed(3)
    with sandbox(503) as (used, _):
        failure(used)
    assert random.random() == random.Random(3).random()


def test_dead_server_is_unreachable() -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # taken, but nobody listens
        settings = RemoteSettings(
            provider="sandbox_fusion", url=f"http://127.0.0.1:{closed.getsockname()[1]}", time_limit=LONG
        )
        clock = Clock()
        status, text = failure(RemoteSandbox(settings, clock.sleep, clock.now))
    assert (status, text) == ("unreachable", "the remote sandbox gave no result: no connection (Connection refused)")
    assert len(clock.pauses) == ATTEMPTS - 1


# Services that are none


@pytest.mark.parametrize(
    "body",
    [
        b"<html>Welcome</html>", b"", b"[]", b"null", b"{}", b'{"status": "Success"}', b"\xff\xfe", b"[" * 100_000,
        json.dumps(answer("Perfect", "Finished", 0)).encode(),
        json.dumps(answer("Success", "Sleeping", 0)).encode(),
        json.dumps(answer("Success", "Finished", None)).encode(),
        json.dumps(answer("Success", "Finished", 10**30)).encode(),
        json.dumps(answer("Success", "Finished", -1000)).encode(),
        json.dumps(answer("Success", "Finished", 0) | {"run_result": "x"}).encode(),
        json.dumps(answer("Success", "Finished", 0, stdout=["x"])).encode(),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_malformed_response_is_unreachable_at_once(body: bytes) -> None:
    with sandbox(body) as (used, server):
        status, text = failure(used)
    assert (status, text) == (
        "unreachable",
        "the remote sandbox gave no result: its response is not in SandboxFusion's format",
    )
    assert len(server.requests) == 1


def test_redirect_is_refused() -> None:
    with sandbox("redirect", token=TOKEN) as (used, server):
        status, text = failure(used)
    assert (status, text) == ("unreachable", "the remote sandbox gave no result: it responded 307 with a redirect")
    assert len(server.requests) == 1 and server.others == []


@pytest.mark.parametrize("status", [401, 403, 404, 422])
def test_refusal_of_the_service_is_unreachable_at_once(status: int) -> None:
    with sandbox(status) as (used, server):
        assert failure(used) == ("unreachable", f"the remote sandbox gave no result: it responded {status}")
    assert len(server.requests) == 1


# TLS


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")


@needs_openssl
@pytest.mark.parametrize(
    ("host", "is_known", "reason"),
    [
        ("127.0.0.1", True, None),
        ("127.0.0.1", False, "self-signed certificate"),
        ("127.0.0.2", True, "IP address mismatch, certificate is not valid for '127.0.0.1'."),
    ],
)
def test_certificate_is_verified(host: str, is_known: bool, reason: str | None, tmp_path: Path) -> None:
    certificate, key = make_certificate(tmp_path, host)
    with sandbox_server(certificate=(certificate, key)) as server:
        known = str(certificate) if is_known else None
        settings = RemoteSettings(
            provider="sandbox_fusion", url=server.url, token=TOKEN, certificates=known, time_limit=LONG
        )
        used = RemoteSandbox(settings)
        if reason is None:
            assert used.run("6 * 7", seed=0) == "42\n"
        else:
            text = f"the remote sandbox gave no result: its certificate is not accepted ({reason})"
            assert failure(used) == ("unreachable", text)
            assert server.requests == []


@needs_openssl
def test_certificates_are_read_once_and_before_the_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificate, key = make_certificate(tmp_path, "127.0.0.1")
    made = []

    def make(cafile: str | None) -> ssl.SSLContext:
        made.append(cafile)
        return create(cafile=cafile)

    create = ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", make)
    with sandbox_server(certificate=(certificate, key)) as server:
        settings = RemoteSettings(
            provider="sandbox_fusion", url=server.url, certificates=str(certificate), time_limit=LONG
        )
        used = RemoteSandbox(settings)
        assert used.provider is not None and made == [str(certificate)]
        assert [used.run(code, seed=0) for code in ("1", "2")] == ["1\n", "2\n"]
        assert made == [str(certificate)]


# The token


def test_token_is_sent_and_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX", TOKEN)
    with sandbox_server() as server:
        config = RolloutConfig(sandbox_url=server.url, sandbox_token_variable="SANDBOX", tools=(REMOTE,))
        settings = RemoteSettings.of(config)
        assert settings is not None
        used = RemoteSandbox(replace(settings, time_limit=LONG))
        assert used.run(f"print('I know {TOKEN}')", seed=0) == f"I know {HIDDEN}\n"
    assert server.authorizations == [f"Bearer {TOKEN}"]
    assert TOKEN not in repr(settings) + repr(config) + repr(used.provider)
    assert redact(f"log line with {TOKEN}") == f"log line with {HIDDEN}"


def test_token_in_the_reason_of_a_failure_is_hidden() -> None:
    broken = answer("SandboxError", "Error", message=f"Bearer {TOKEN} is unknown")
    with sandbox(lambda _: broken, token=TOKEN) as (used, _):
        status, text = failure(used)
    assert status == "unreachable" and HIDDEN in text and TOKEN not in text


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (None, "is not set on this machine"),
        ("", "is not set on this machine"),
        ("a\nb", "is not a token"),
        ("é", "is not a token"),
    ],
)
def test_unusable_token_raises(value: str | None, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SANDBOX", raising=False)
    if value is not None:
        monkeypatch.setenv("SANDBOX", value)
    config = RolloutConfig(sandbox_url="https://host", sandbox_token_variable="SANDBOX")
    with pytest.raises(ConfigError, match=f"rollout.sandbox_token_variable=SANDBOX: .* {reason}"):
        RemoteSettings.of(config)


# Providers


class Echo:
    """Provider of a user."""

    def __init__(self, service: Service) -> None:
        self.service = service

    def run(self, job: Job, seconds: float) -> Execution:
        return Execution(output=f"{self.service.url} {job.stdin} {job.seconds < seconds}", return_code=7)


def test_provider_may_be_a_class_of_the_user() -> None:
    settings = RemoteSettings(provider=f"{__name__}:Echo", url="http://x", time_limit=LONG)
    assert RemoteSandbox(settings).run("code", seed=0) == "http://x code True\n[exit code 7]"


class Broken(Echo):
    """Provider of a user that cannot be made."""

    def __init__(self, service: Service) -> None:
        raise KeyError(service.token)


def test_provider_that_cannot_be_made_is_unreachable_without_its_token() -> None:
    settings = RemoteSettings(provider=f"{__name__}:Broken", url="http://x", token=TOKEN, time_limit=LONG)
    reason = f"the remote sandbox gave no result: its provider cannot be made: KeyError: '{HIDDEN}'"
    assert failure(RemoteSandbox(settings)) == ("unreachable", reason)
    assert sandbox_issue(RolloutConfig(sandbox_url="http://x", sandbox_provider=f"{__name__}:Broken")) is not None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fusion", "rollout.sandbox_provider='fusion' must be one of sandbox_fusion, or package.module:Class"),
        ("no_such_module:Class", "rollout.sandbox_provider: 'no_such_module:Class' cannot be imported"),
    ],
)
def test_unknown_provider_raises(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sandbox_issue(RolloutConfig(sandbox_url="http://localhost", sandbox_provider=name))


# The trial


def test_sandbox_issue_of_a_working_service_is_none() -> None:
    with sandbox_server() as server:
        assert sandbox_issue(RolloutConfig(sandbox_url=server.url, time_limit=LONG)) is None
    assert sandbox_issue(RolloutConfig()) is None


@pytest.mark.parametrize(
    ("given", "issue"),
    [
        (401, "the remote sandbox gave no result: it responded 401"),
        (lambda _: answer("Success", "Finished", 0, "43\n"), r"the remote sandbox returned '43\n' for 6 * 7"),
    ],
)
def test_sandbox_issue_of_another_service_is_one_line(given: Answer, issue: str) -> None:
    with sandbox_server(given) as server:
        assert sandbox_issue(RolloutConfig(sandbox_url=server.url, time_limit=LONG)) == issue


def test_tool_without_settings_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_python, "_sandboxes", [])
    with pytest.raises(RuntimeError, match=r"set rollout\.sandbox_url"):
        remote_python.python("1")
