"""Tests of the preflight checks and of their order."""

import io
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from sandbox_server import sandbox_server

from grpo_ray.config.loader import load_config
from grpo_ray.driver.preflight import checks as preflight
from grpo_ray.driver.preflight.checks import (
    AUDIT_CHECKS,
    CHECKS,
    Check,
    check_remote_sandbox,
    explain_code_memory,
    run_preflight,
)
from grpo_ray.driver.preflight.run_context import RunContext
from grpo_ray.errors import ConfigError
from grpo_ray.observers.terminal.progress import ProgressLine
from grpo_ray.storage.run_folder import RunFolder


def make_context(folder: Path, *overrides: str) -> RunContext:
    """Return the context of the run `run` in a folder, with progress printed to a buffer."""
    config = load_config(None, ["run.name=run", f"run.storage_path={folder}", *overrides])
    progress = ProgressLine(config.grpo.max_steps, Console(file=io.StringIO(), width=200))
    return RunContext(config, RunFolder(str(folder), "run"), progress)


def printed(context: RunContext) -> list[str]:
    file = context.progress.console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().splitlines()


# The table


def test_checks_have_names_of_their_own() -> None:
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    assert [check.name for check in AUDIT_CHECKS] == ["TRL arguments", "storage", "engine system", "remote sandbox"]


def test_code_that_could_exhaust_the_node_is_a_notice(tmp_path: Path) -> None:
    code = 'rollout.tools=["grpo_ray.tools.python_tool:python"]'
    small = ("grpo.prompts_per_step=2", "grpo.num_generations=2", "rollout.memory_gib=0.25")
    large = ("grpo.prompts_per_step=2000", "rollout.max_active=1000", "rollout.memory_gib=100")
    assert explain_code_memory(make_context(tmp_path, code, *small)) == ()
    assert explain_code_memory(make_context(tmp_path, *large)) == ()
    (notice,) = explain_code_memory(make_context(tmp_path, code, *large))
    assert "up to 100000 GiB at once (1000 completions, rollout.memory_gib=100)" in notice
    assert "lower rollout.memory_gib or rollout.max_active" in notice


def test_run_preflight_shows_notices_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def note(*texts: str) -> Callable[[RunContext], Sequence[str]]:
        return lambda context: texts

    connected: list[object] = []

    def connect(config: object) -> list[str]:
        connected.append(config)
        return ["of the cluster"]

    monkeypatch.setattr(preflight, "connect", connect)
    monkeypatch.setattr(preflight, "starts_cluster", lambda: True)
    context = make_context(tmp_path)
    checks = [
        Check("one", note("first"), phase="settings"),
        Check("two", note("second", "third"), phase="data"),
        Check("three", note("before"), phase="settings", beside_connection=True),
        Check("four", note(), phase="data"),
    ]
    run_preflight(context, checks)
    assert printed(context) == [
        "starting Ray", "of the cluster", "settings", "before", "first", "data", "second", "third"
    ]  # fmt: skip
    assert connected == [context.config]


@pytest.mark.parametrize("beside_connection", [False, True])
def test_run_preflight_first_error_ends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside_connection: bool
) -> None:
    def refuse(context: RunContext) -> Sequence[str]:
        raise ConfigError("refused")

    monkeypatch.setattr(preflight, "connect", lambda config: [])
    never = Check("never", lambda context: pytest.fail("a later check was run"))
    with pytest.raises(ConfigError, match="refused"):
        run_preflight(make_context(tmp_path), [Check("one", refuse, beside_connection=beside_connection), never])


# The remote sandbox


def remote_context(folder: Path, url: str) -> RunContext:
    tools = "rollout.tools=['grpo_ray.tools.remote_python:python']"
    return make_context(folder, tools, f"rollout.sandbox_url={url}", "rollout.time_limit=300", "rollout.max_turns=2")


def test_check_remote_sandbox_runs_a_program_there(tmp_path: Path) -> None:
    with sandbox_server() as server:
        notices = check_remote_sandbox(remote_context(tmp_path, server.url))
    assert list(notices) == [f"the remote sandbox at {server.url} runs code"]
    assert [each["stdin"] for each in server.requests] == ["6 * 7"]
    assert check_remote_sandbox(make_context(tmp_path)) == ()


def test_check_remote_sandbox_that_refuses_raises_one_line(tmp_path: Path) -> None:
    with sandbox_server(403) as server, pytest.raises(ConfigError) as raised:
        check_remote_sandbox(remote_context(tmp_path, server.url))
    assert str(raised.value) == (
        f"rollout.sandbox_url={server.url}: the remote sandbox gave no result: it responded 403; start the service, or "
        "correct the address"
    )


def test_check_run_trackers_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert preflight.check_run_trackers(make_context(tmp_path)) == ()  # tensorboard
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        preflight.check_run_trackers(make_context(tmp_path, "run.trackers=[wandb]"))
    assert str(caught.value) == (
        "run.trackers: wandb is not installed; pip install 'grpo-ray[wandb]', or leave wandb out"
    )


def test_check_reward_models_folder_without_a_model_raises(tmp_path: Path) -> None:
    (tmp_path / "judge").mkdir()
    context = make_context(tmp_path, f"rewards.functions=[correctness, {tmp_path / 'judge'}]")
    with pytest.raises(ConfigError, match=r"the reward model .*judge cannot be read"):
        preflight.check_reward_models(context)
    assert preflight.check_reward_models(make_context(tmp_path)) == ()


@pytest.mark.parametrize(("score", "is_read"), [("correctness", False), ("reward", True)])
def test_check_reward_models_reads_only_those_that_fine_tuning_uses(tmp_path: Path, score: str, is_read: bool) -> None:
    (tmp_path / "judge").mkdir()
    sft = ["run.kind=sft", "data.train=a.jsonl", "data.heldout=arithmetic", f"heldout.score={score}"]
    context = make_context(tmp_path, f"rewards.functions=[correctness, {tmp_path / 'judge'}]", *sft)
    raises: AbstractContextManager[Any] = pytest.raises(ConfigError, match="cannot be read")
    with raises if is_read else nullcontext():
        preflight.check_reward_models(context)
