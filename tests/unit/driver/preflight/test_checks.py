"""Tests of the preflight checks: their order, and the refusal to continue a run on other settings or problems."""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console
from sandbox_server import sandbox_server

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.driver.preflight import checks as preflight
from grpo_ray.driver.preflight.checks import (
    AUDIT_CHECKS,
    CHECKS,
    Check,
    RunContext,
    check_dataset,
    check_old_run,
    check_remote_sandbox,
    check_same_run,
    explain_code_memory,
    replaces_old_run,
    require_same_problems,
    run_preflight,
)
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


# A run that exists


def write_checkpoint(folder: RunFolder) -> None:
    manifest = {"metrics": {"step": 2}, "serial": 1, "files": {}}
    folder.write_json(manifest, "checkpoint-000002", "manifest.json")


@pytest.mark.parametrize(
    "changed",
    [
        "run.seed=1", "grpo.prompts_per_step=2", "grpo.num_generations=2", "data.train=gsm8k", "data.limit=5",
        "model.path=other", "cluster.shard_learner=true",
    ],
)  # fmt: skip
def test_check_same_run_changed_field_raises(changed: str, tmp_path: Path) -> None:
    first = make_context(tmp_path, "grpo.save_steps=2")
    (tmp_path / "run").mkdir()
    first.folder.write_text(yaml.safe_dump(first.config.to_dict()), "config.yaml")
    other = make_context(tmp_path, "grpo.save_steps=2", changed)
    check_same_run(other)  # no checkpoint yet, so nothing can contradict
    # Not Ray's record: a driver may have died between the checkpoint and the record.
    write_checkpoint(first.folder)
    check_same_run(make_context(tmp_path, "grpo.save_steps=2", "grpo.max_steps=7"))
    with pytest.raises(ConfigError, match=changed.partition("=")[0].replace(".", r"\.")):
        check_same_run(other)


def test_replaces_old_run_only_with_resume_never(tmp_path: Path) -> None:
    starting_over, continuing = make_context(tmp_path, "run.resume=never"), make_context(tmp_path)
    (tmp_path / "run").mkdir()
    assert not replaces_old_run(starting_over)  # an empty folder is no run
    starting_over.folder.write_text("{}", "config.yaml")
    assert replaces_old_run(starting_over) and not replaces_old_run(continuing)


def test_check_old_run_in_object_store_is_refused_early(tmp_path: Path) -> None:
    folder = RunFolder("mock://bucket/runs", "run")
    context = replace(make_context(tmp_path, "run.resume=never"), folder=folder)
    assert check_old_run(context) == ()  # there is no run yet
    folder.write_text("{}", "config.yaml")
    with pytest.raises(ConfigError, match=r"choose another run\.name, or run\.resume=latest"):
        check_old_run(context)


def test_checks_of_old_run_are_skipped_when_it_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    folder = make_context(tmp_path).folder
    folder.write_text(yaml.safe_dump(make_context(tmp_path).config.to_dict()), "config.yaml")
    write_checkpoint(folder)
    check_same_run(make_context(tmp_path, "run.resume=never", "run.seed=1"))
    check_dataset(make_context(tmp_path, "run.resume=never"), DatasetFingerprint.of(["a"]))


def test_require_same_problems_other_problems_raise() -> None:
    recorded, current = DatasetFingerprint.of(["a", "b"]), DatasetFingerprint.of(["a", "c"])
    require_same_problems(load_config(), recorded, recorded, "run")
    with pytest.raises(ConfigError, match="2 problems as before, but not the same ones"):
        require_same_problems(load_config(), recorded, current, "run")
    with pytest.raises(ConfigError, match="3 problems instead of 2"):
        require_same_problems(load_config(), recorded, DatasetFingerprint.of(["a", "b", "c"]), "run")


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
