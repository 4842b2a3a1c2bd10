"""Tests of the refusal to continue a run on other settings or problems."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.driver.preflight.run_context import RunContext
from grpo_ray.driver.preflight.same_run import (
    FORK_FILE,
    POLICY_CONTENTS,
    check_dataset,
    check_old_run,
    check_same_run,
    record_dataset,
    replaces_old_run,
    require_same_problems,
)
from grpo_ray.errors import ConfigError
from grpo_ray.observers.terminal.progress import ProgressLine
from grpo_ray.storage.run_folder import RunFolder


def make_context(folder: Path, *overrides: str) -> RunContext:
    """Return the context of the run `run` in a folder, with progress printed to a buffer."""
    config = load_config(None, ["run.name=run", f"run.storage_path={folder}", *overrides])
    progress = ProgressLine(config.grpo.max_steps, Console(file=io.StringIO(), width=200))
    return RunContext(config, RunFolder(str(folder), "run"), progress)


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


def test_branch_at_step_0_has_the_settings_and_problems_of_its_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "policy").mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        (tmp_path / "policy" / name).write_text("{}")
    path = f"model.path={tmp_path / 'policy'}"
    first = make_context(tmp_path, path)
    first.folder.write_text(yaml.safe_dump(first.config.to_dict()), "config.yaml")
    first.folder.write_json(dict(first.policy_contents), POLICY_CONTENTS)
    record_dataset(first.folder, DatasetFingerprint.of(["a"]))
    check_dataset(first, DatasetFingerprint.of(["b"]))  # a run that was killed before its first checkpoint
    first.folder.write_json({"step": 0}, FORK_FILE)
    check_same_run(first)
    check_dataset(first, DatasetFingerprint.of(["a"]))
    with pytest.raises(ConfigError, match="not the same ones"):
        check_dataset(first, DatasetFingerprint.of(["b"]))
    with pytest.raises(ConfigError, match=r"run\.seed"):
        check_same_run(make_context(tmp_path, path, "run.seed=1"))
    (tmp_path / "policy" / "config.json").write_text('{"hidden_size": 4}')
    with pytest.raises(ConfigError, match="its config are not those that the run"):
        check_same_run(make_context(tmp_path, path))


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
