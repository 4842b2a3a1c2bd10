"""The remote Python tool in the processes of a real pool, with a service on this machine."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sandbox_server import Answer, SandboxServer, answer, run_program, sandbox_server

from grpo_ray.config.schema import RolloutConfig
from grpo_ray.text.redaction import HIDDEN
from grpo_ray.tools.definitions import load_definition
from grpo_ray.tools.sandbox.pool import Episode, EpisodePool, SandboxLimits

WAIT = 240.0
"""Seconds after which a test gives up; far more than any of them takes."""
TOKEN = "t0ken-of-the-sandbox"


@contextmanager
def pool(*answers: Answer, time_limit: float = 120.0) -> Iterator[tuple[EpisodePool, SandboxServer]]:
    with sandbox_server(*answers) as server:
        config = RolloutConfig(
            tools=("grpo_ray.tools.remote_python:python", "grpo_ray.tools.examples:multiply"),
            sandbox_url=server.url,
            sandbox_token_variable="SANDBOX",
            time_limit=time_limit,
        )
        with EpisodePool(load_definition(config), SandboxLimits.of(config)) as opened:
            yield opened, server


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SANDBOX", TOKEN)


def run(episode: Episode, code: str) -> tuple[str, str | None]:
    result = episode.call("python", {"code": code}).result(WAIT)
    return result.status, result.text


def test_completions_run_code_in_the_remote_sandbox() -> None:
    with pool() as (opened, server):
        first, second = (opened.open(None, seed=0, columns={}, call_seed=seed) for seed in (1, 1))
        assert run(first, "x = 20\nx + 1") == ("ok", "21\n")
        status, text = run(first, "x")
        assert status == "ok" and text is not None and text.endswith("NameError: name 'x' is not defined\n")
        # The same seed of a completion gives the same random numbers, also after another number of calls.
        dice = "import random\nrandom.random()"
        third = opened.open(None, seed=0, columns={}, call_seed=1)
        assert run(second, dice) == run(third, dice)
        assert run(second, dice) != run(second, dice)
        assert run(second, f"print('{TOKEN}')") == ("ok", f"{HIDDEN}\n")
        assert opened.isolation is None
    assert set(server.authorizations) == {f"Bearer {TOKEN}"}


def test_code_is_not_executed_here(tmp_path: Path) -> None:
    """The service answers without running anything: the file that the code writes does not exist."""
    done = answer("Success", "Finished", 0, "done\n")
    with pool(lambda _: done) as (opened, server):
        episode = opened.open(None, seed=0, columns={}, call_seed=0)
        code = f"open({str(tmp_path / 'file')!r}, 'w')"
        assert run(episode, code) == ("ok", "done\n")
    assert [each["stdin"] for each in server.requests] == [code] and not (tmp_path / "file").exists()


def test_failures_have_their_status_and_leave_the_process() -> None:
    def short(request: Mapping[str, Any]) -> Any:
        return run_program({**request, "run_timeout": 0.5})

    with pool(short, 404, 413, b"\0", run_program) as (opened, server):
        episode = opened.open(None, seed=0, columns={}, call_seed=0)
        assert run(episode, "while True: pass") == ("timeout", "no result within 60 s")
        assert run(episode, "1") == ("unreachable", "the remote sandbox gave no result: it responded 404")
        assert run(episode, "1") == ("error", "the code is too long for the sandbox")
        assert run(episode, "1")[0] == "unreachable"
        assert run(episode, "6 * 7") == ("ok", "42\n")
        assert episode.call("multiply", {"a": 6, "b": 7}).result(WAIT).text == "42"
    assert len(server.requests) == 5


PROVIDER = """
import os
from grpo_ray.tools.remote.provider import Execution

IMPORTED = os.environ["ADDRESS_KEY"]

class Own:
    def __init__(self, service):
        self.made = os.environ["ADDRESS_KEY"]

    def run(self, job, seconds):
        return Execution(output=f"{IMPORTED} {self.made} {os.environ.get('ADDRESS_KEY')}", return_code=0)
"""


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (("ADDRESS_KEY",), ("ok", "1 1 None")),
        (
            (),
            (
                "unreachable",
                "the remote sandbox gave no result: rollout.sandbox_provider: 'own_provider:Own' cannot be imported: "
                "KeyError: 'ADDRESS_KEY' ({file}, line 5)",
            ),
        ),
    ],
)
def test_own_provider_is_made_with_the_variables_that_the_config_names(
    variables: tuple[str, ...], expected: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own_provider.py"
    file.write_text(PROVIDER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("ADDRESS_KEY", "1")
    config = RolloutConfig(
        tools=("grpo_ray.tools.remote_python:python",),
        sandbox_url="http://localhost",
        sandbox_provider="own_provider:Own",
        time_limit=120.0,
    )
    status, text = expected
    with EpisodePool(load_definition(config), SandboxLimits.of(config), variables=variables) as opened:
        assert run(opened.open(None, seed=0, columns={}, call_seed=0), "1") == (status, text.format(file=file))
        assert ("ADDRESS_KEY" in opened.withheld) == (not variables)
