"""Tests of a run's error messages, of the policy that its baseline measures, and of late measurements."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import OutOfMemoryError

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import Config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.driver import run as run_module
from grpo_ray.driver.launch import InitialPolicy, ResumePoint
from grpo_ray.driver.run import PreparedRun, describe_training_failure
from grpo_ray.driver.trainer import TrainerPlan
from grpo_ray.errors import DataError, RepeatedWorkerError
from grpo_ray.evaluation.metrics import EvaluationResult
from grpo_ray.observers.feed import RunFeed
from grpo_ray.observers.follower import RunFiles
from grpo_ray.resilience.error_triage import MEMORY_ADVICE
from grpo_ray.storage.checkpoints import list_checkpoints, resume_candidates
from grpo_ray.storage.jsonl import read_events
from grpo_ray.storage.ray_snapshot import SNAPSHOT
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.telemetry.measures import Measure

TOOLS = ["rollout.tools=['grpo_ray.tools.examples:multiply']"]
KILLED = "2 worker(s) were killed due to the node running low on memory. Set RAY_memory_usage_threshold"
"""Message of Ray 2.60's memory monitor."""


class FailedTraining(Exception):
    """Error with the attributes of Ray Train's `TrainingFailedError`."""

    def __init__(self, message: str = "", **attributes: object):
        super().__init__(message)
        self.__dict__.update(attributes)


@pytest.mark.parametrize(
    ("error", "first_line"),
    [
        (FailedTraining(controller_failure=RepeatedWorkerError("the same error")), "the same error"),
        (FailedTraining(controller_failure=DataError("row 3")), "DataError: row 3"),
        (FailedTraining(worker_failures={0: ConnectionError("reset"), 1: KeyError("b")}), "worker 1: KeyError: 'b'"),
        (FailedTraining(worker_failures={1: OutOfMemoryError(KILLED)}), f"worker 1: {MEMORY_ADVICE}"),
        (FailedTraining(KILLED), f"a worker died: {MEMORY_ADVICE}"),
    ],
    ids=["repeated", "controller", "worker", "memory of a worker", "memory"],
)
def test_describe_training_failure_names_cause_and_logs(tmp_path: Path, error: Exception, first_line: str) -> None:
    folder = RunFolder(str(tmp_path), "run")
    lines = describe_training_failure(error, folder).splitlines()
    assert lines == [first_line, f"the workers' logs are in {tmp_path}/run/logs"]


def test_describe_training_failure_without_cause_is_one_line(tmp_path: Path) -> None:
    text = describe_training_failure(FailedTraining("no\nreason"), RunFolder(str(tmp_path), "run"))
    assert text == f"no reason; the workers' logs are in {tmp_path}/run/logs"


class EvaluatedError(Exception):
    """Error that ends the baseline where the engines would start."""


class UnmeasuredBaseline:
    """Baseline of a run that has measured nothing."""

    def missing(self) -> list[str]:
        return ["heldout"]


class MeasuredBaseline:
    """Baseline of a run without held-out sets to measure."""

    def missing(self) -> list[str]:
        return []

    def read(self) -> dict[str, Any]:
        return {}


@pytest.mark.parametrize(
    ("measured_path", "trusts_code", "limits_template"),
    [("policy", False, False), ("other/checkpoint-000008", False, True), ("other/checkpoint-000008", True, False)],
    ids=["own", "other run", "other run with code"],
)
def test_baseline_limits_only_templates_of_other_runs(
    measured_path: str, trusts_code: bool, limits_template: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[Any] = []

    def evaluate(config: Any, policy: str, splits: Any, *, limits_template: bool, on_progress: Any) -> None:
        taken.extend([policy, limits_template])
        raise EvaluatedError

    monkeypatch.setattr(run_module, "evaluate", evaluate)
    config = load_config(None, [f"model.trust_remote_code={str(trusts_code).lower()}"])
    with pytest.raises(EvaluatedError):
        unmeasured_run(config, measured_path).measure_heldout_before()
    assert taken == [measured_path, limits_template]


@pytest.mark.parametrize(
    ("settings", "owns_cluster", "ends"),
    [(TOOLS, True, True), (TOOLS, False, False), ([], True, False)],
    ids=["tools", "cluster of the caller", "no tools"],
)
def test_baseline_ends_warm_start_before_tools_run(
    settings: list[str], owns_cluster: bool, ends: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []

    def evaluate(*args: Any, **options: Any) -> None:
        calls.append("evaluate")
        raise EvaluatedError

    monkeypatch.setattr(run_module, "evaluate", evaluate)
    monkeypatch.setattr(run_module, "end_warm_start", lambda: calls.append("end"))
    with pytest.raises(EvaluatedError):
        unmeasured_run(load_config(None, settings), "policy", owns_cluster).measure_heldout_before()
    assert calls == (["end", "evaluate"] if ends else ["evaluate"])


def unmeasured_run(config: Config, measured_path: str, owns_cluster: bool = False) -> PreparedRun:
    """Make a run that has measured nothing, and has no folder and no workers."""
    progress = SimpleNamespace(notice=None, phase=None)
    plan: Any = SimpleNamespace(
        context=SimpleNamespace(config=config, folder=None, progress=progress, owns_cluster=owns_cluster),
        coordinator=None,
        baseline=UnmeasuredBaseline(),
        policy=InitialPolicy("policy", measured_path, "identity"),
        indexes=SimpleNamespace(heldout_splits={"heldout": None}),
    )
    lease: Any = None
    return PreparedRun(plan, 0.0, lease, ExitStack())


@pytest.mark.parametrize(("score", "phases"), [("correctness", []), ("reward", ["loading the reward models"])])
def test_fine_tuning_loads_reward_models_only_to_measure(
    score: str, phases: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Config] = []

    @contextmanager
    def running(config: Config) -> Iterator[None]:
        started.append(config)
        yield

    monkeypatch.setattr(run_module, "running_reward_models", running)
    sft = ["run.kind=sft", "data.train=a.jsonl", "data.heldout=arithmetic", f"heldout.score={score}"]
    config = load_config(None, ["rewards.functions=[correctness, a/model]", *sft])
    shown: list[str] = []
    run: Any = SimpleNamespace(config=config, progress=SimpleNamespace(phase=shown.append))
    with PreparedRun._reward_models(run):
        assert shown == phases and len(started) == len(phases)


@pytest.mark.parametrize(("save_steps", "scores"), [(3, [0.75 - 3e-12]), (2, [None])], ids=["regular", "by a stop"])
def test_ray_train_gets_the_score_of_a_missed_measurement(
    save_steps: int, scores: list[float | None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it Ray Train would delete the checkpoint as the worst one, even if it is the best."""
    folder = RunFolder(str(tmp_path), "run")
    manifest = {"metrics": {"step": 3}, "serial": 1, "files": {}}
    folder.write_json(manifest, "checkpoint-000003", "manifest.json")
    three_of_four = Measure(0.75, 0.3, 0.95, 4)
    result = EvaluationResult(4, 0, 1, three_of_four, three_of_four, None, 0.0, 1.0)
    monkeypatch.setattr(run_module, "evaluate", lambda *args, **options: {"heldout": result})
    monkeypatch.setattr(run_module, "RunFollower", lambda *args: nullcontext(SimpleNamespace()))
    config = load_config(None, [f"grpo.save_steps={save_steps}"])
    progress = SimpleNamespace(notice=print, phase=print, baseline=print)
    plan: Any = SimpleNamespace(
        context=SimpleNamespace(config=config, folder=folder, progress=progress, owns_cluster=False),
        baseline=MeasuredBaseline(),
        coordinator=None,
        heldout_conditions={"heldout": {}},
        indexes=SimpleNamespace(heldout_splits={"heldout": None}),
        pool=None,
        resume=ResumePoint(list_checkpoints(folder)[0]),
    )
    lease: Any = SimpleNamespace()
    run = PreparedRun(plan, 0.0, lease, ExitStack())
    vars(run)["feed"] = RunFeed([])
    read: list[float | None] = []

    def fit() -> None:
        snapshot = json.loads(folder.read_text(SNAPSHOT))
        read.extend(each["metrics"].get("checkpoint/score") for each in snapshot["checkpoint_results"])

    trainer: Any = SimpleNamespace(fit=fit)
    run.fit(trainer)
    assert read == scores


@pytest.mark.parametrize(
    ("accuracy", "settings", "start", "measured"),
    [
        (0.75, [], 8, [8]),
        (0.25, [], 4, [8]),
        (0.75, ["grpo.max_steps=8", "grpo.save_steps=3"], 8, [8]),  # the last step is always measured
        (0.75, ["grpo.save_steps=3"], 4, []),  # a stop had saved step 8, which the run would not have measured
        (0.75, ["run.resume=latest"], 8, []),  # it is measured before training
        (0.75, ["run.best_metric=reward/mean"], 4, []),
    ],
    ids=["better", "worse", "complete", "by a stop", "latest", "by a reward"],
)
def test_best_checkpoint_is_chosen_after_missed_measurements(
    accuracy: float,
    settings: list[str],
    start: int,
    measured: list[int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A kill in step 9 has cut off the measurement of step 8 in the background."""
    folder = RunFolder(str(tmp_path), "run")
    for step, metrics in ((4, {"heldout/accuracy": 0.5, "reward/mean": 0.9}), (8, {"reward/mean": 0.8})):
        manifest = {"metrics": {"step": step, **metrics}, "serial": step, "files": {}}
        measured_on: dict[str, Any] | None = {"heldout": {}} if step == 4 else None
        folder.write_json(manifest | {"measured_on": measured_on}, f"checkpoint-{step:06d}", "manifest.json")
    measure = Measure(accuracy, 0.0, 1.0, 4)
    result = EvaluationResult(4, 0, 1, measure, measure, None, 0.0, 1.0)
    evaluated: list[str] = []

    def evaluate(config: Config, policy: str, *arguments: Any, **options: Any) -> dict[str, EvaluationResult]:
        evaluated.append(Path(policy).name)
        return {"heldout": result}

    monkeypatch.setattr(run_module, "evaluate", evaluate)
    config = load_config(None, ["run.resume=best", "grpo.save_steps=4", "grpo.max_steps=20",
                                "run.best_metric=heldout/accuracy", *settings])  # fmt: skip
    progress = SimpleNamespace(notice=print, phase=print)
    context: Any = SimpleNamespace(config=config, folder=folder, progress=progress, owns_cluster=False)
    indexes: Any = SimpleNamespace(
        heldout_splits={"heldout": None}, heldout_fingerprints={"heldout": DatasetFingerprint.of(["a"])}
    )
    before = resume_candidates(folder, config.run.resume, config.ranking_metric)[0]
    policy: Any = None
    plan = TrainerPlan(context, indexes, policy, ResumePoint(before), coordinator=None)
    lease: Any = SimpleNamespace()
    run = PreparedRun(plan, 0.0, lease, ExitStack())
    vars(run)["feed"] = RunFeed([])
    run.choose_best()
    assert evaluated == [f"checkpoint-{step:06d}" for step in measured]
    assert run.plan.resume.step == start
    assert run.has_steps_left == (start < config.grpo.max_steps)
    # The workers choose among the same checkpoints.
    assert resume_candidates(folder, config.run.resume, config.ranking_metric)[0].step == start


@pytest.mark.parametrize("changes_config", [True, False])
def test_launch_without_a_step_that_changes_the_config_is_an_event(tmp_path: Path, changes_config: bool) -> None:
    """Without it `config.yaml` would pass for the settings of the launch before, which took the steps."""
    folder = RunFolder(str(tmp_path), "run")
    manifest = {"metrics": {"step": 8}, "serial": 1, "files": {}, "measured_on": {}}
    folder.write_json(manifest, "checkpoint-000008", "manifest.json")
    config = load_config(None, ["grpo.max_steps=8"])
    progress = SimpleNamespace(notice=print, phase=print)
    plan: Any = SimpleNamespace(
        context=SimpleNamespace(config=config, folder=folder, progress=progress, owns_cluster=False),
        baseline=MeasuredBaseline(),
        coordinator=None,
        heldout_conditions={},
        indexes=SimpleNamespace(heldout_fingerprints={"heldout": DatasetFingerprint.of(["a"])}),
        resume=ResumePoint(list_checkpoints(folder)[0]),
    )
    lease: Any = SimpleNamespace(confirm=lambda: None)
    run = PreparedRun(plan, 7.0, lease, ExitStack(), changes_config=changes_config)
    files = RunFiles(folder, print)
    vars(run)["feed"] = RunFeed([files])
    for event in ("launched", "began", "training"):  # of a driver that was killed after its last step
        files.event({"event": event, "at": 1.0, "step": 0, "workers": 2})
    summary = run.finish()
    events = list(read_events(folder))
    new = events[3:]
    assert [event["event"] for event in new] == (["launched", "ended"] if changes_config else [])
    if changes_config:
        assert new[0]["at"] == 7.0
        assert (summary.price.failures, summary.price.startup_seconds, summary.price.restart_seconds) == (1, 0.0, 0.0)
