"""Tests of decisions of a sweep that need no cluster: invalid clones, ends of drivers, measurements at a rung."""

import io
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from grpo_ray import cli
from grpo_ray.config.fields import type_adapter
from grpo_ray.config.sweep_file import SweepConfig
from grpo_ray.errors import ConfigError, GrpoRayError
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.sweep import runner as module
from grpo_ray.sweep.board import TrialActivity
from grpo_ray.sweep.requests import SweepRequest, read_requests, write_request
from grpo_ray.sweep.runner import SweepRunner, reason_of_stop, run_sweep
from grpo_ray.sweep.state import SweepState, TrialRecord, begin_state
from grpo_ray.sweep.table import SweepScreen
from grpo_ray.sweep.trial_process import STOPPED, _BoardObserver
from grpo_ray.sweep.trials import SweepTrial, TrialConfigs, list_trials

METRIC = "heldout/low"


class Lease:
    """Lease that nobody else takes."""

    def confirm(self) -> None:
        pass


class Screen(SweepScreen):
    """Screen that keeps its lines."""

    def __init__(self) -> None:
        super().__init__(Console(file=io.StringIO(), width=300))
        self.lines: list[str] = []

    def notice(self, text: str) -> None:
        self.lines.append(text)


class Run:
    """Runs of a sweep's trials as they are on the disk, and results of drivers."""

    def __init__(self) -> None:
        self.stored: dict[str, tuple[int, float | None]] = {}
        """Trial -> step of its latest checkpoint, and the value of the metric."""
        self.measured_as_unknown: set[str] = set()
        """Trials whose checkpoint was measured, although there is no value."""


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """Give each trial the checkpoint of `Run.stored`; no driver is started."""
    runs = Run()

    def list_checkpoints(folder: RunFolder) -> list[Any]:
        if folder.name not in runs.stored:
            return []
        step, value = runs.stored[folder.name]
        measured_on: dict[str, str] | None = (
            {} if value is not None or folder.name in runs.measured_as_unknown else None
        )
        metrics: dict[str, float] = {} if value is None else {METRIC: value}
        return [SimpleNamespace(name=f"checkpoint-{step:06d}", step=step, metrics=metrics, measured_on=measured_on)]

    monkeypatch.setattr(module.checkpoints, "list_checkpoints", list_checkpoints)
    yield runs


def begin(folder: Path, state: SweepState | None = None, **sweep: Any) -> SweepRunner:
    """Return the runner of a sweep of two trials, a and b, with 8 steps each."""
    fields = {"name": "rates", "trials": [{"name": "a"}, {"name": "b"}], **sweep}
    config: SweepConfig = type_adapter(SweepConfig).validate_python(fields)
    settings = [f"run.storage_path={folder}", "grpo.max_steps=8", "grpo.save_steps=4"]
    configs = TrialConfigs(None, settings, "rates", METRIC)
    own = RunFolder(*configs.folder)
    lease: Any = Lease()
    return SweepRunner(config, configs, own, lease, state or begin_state(own, list_trials(config)), Screen())


def lines_of(runner: SweepRunner) -> list[str]:
    assert isinstance(runner.screen, Screen)
    return runner.screen.lines


def refresh(runner: SweepRunner) -> None:
    runner.check()
    for name in runner.state.names:
        runner._refresh(name)


def standings(runner: SweepRunner) -> dict[str, str]:
    return {record.trial.name: record.standing for record in runner.state.records}


def end_driver(runner: SweepRunner, name: str, pause_at: int | None, stopped: str | None) -> None:
    """Let a driver return that was launched at the trial's current step."""
    config = runner._launch_config(runner.state.record(name), pause_at)
    running = module._Running(None, None, config, runner._facts[name].step)
    runner._settle(name, running, *reason_of_stop(stopped))


TOOLS = {"rollout.tools": ["grpo_ray.tools.examples:multiply"]}
STEPS_OF_A_BATCH = {"grpo.steps_per_generation": 2}
"""Setting that is valid with 8 steps, a checkpoint every 4, and not with a rung at step 3."""


def test_clone_that_does_not_fit_the_rungs_is_refused_with_a_line(tmp_path: Path) -> None:
    runner = begin(tmp_path, rungs={"steps": [3]})
    runner.check()
    write_request(runner.folder, SweepRequest(action="clone", trial="a", overrides=STEPS_OF_A_BATCH))
    runner._carry_out_requests()
    (line,) = lines_of(runner)
    assert line.startswith("clone a: a-clone-1: rungs.steps=3 must be a multiple of grpo.steps_per_generation=2")
    assert standings(runner) == {"a": "active", "b": "active"}
    assert read_requests(runner.folder) == []
    # The next one has the same name, and its own settings.
    write_request(runner.folder, SweepRequest(action="clone", trial="a", overrides={"run.seed": 7}))
    runner._carry_out_requests()
    assert standings(runner) == {"a": "active", "b": "active", "a-clone-1": "active"}
    assert runner._configs["a-clone-1"].run.seed == 7


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        (STEPS_OF_A_BATCH, "rungs.steps=3 must be a multiple of"),
        ({"grpo.learning_rate": -1}, "grpo.learning_rate=-1 must be"),
        ({"rewards.functions": ["no_such_module:reward"]}, "no_such_module"),
    ],
)
def test_recorded_clone_that_is_invalid_now_fails_alone(
    tmp_path: Path, runs: Run, overrides: dict[str, Any], reason: str
) -> None:
    state = begin_state(RunFolder(str(tmp_path), "rates"), [SweepTrial(name=name, overrides={}) for name in "ab"])
    clone = SweepTrial(name="a-clone-1", overrides=overrides, parent="a")
    runner = begin(tmp_path, state.with_record(TrialRecord(trial=clone)), rungs={"steps": [3]})
    refresh(runner)
    runner._write(runner.state)
    assert standings(runner) == {"a": "active", "b": "active", "a-clone-1": "failed"}
    assert reason in runner.state.record("a-clone-1").reason
    assert lines_of(runner)[0].startswith("a-clone-1 takes no part: ")
    assert [row.standing for row in runner._rows()] == ["waiting", "waiting", "failed"]
    # It cannot be resumed either.
    write_request(runner.folder, SweepRequest(action="resume", trial="a-clone-1"))
    runner._carry_out_requests()
    assert "resume a-clone-1: " in lines_of(runner)[-1] and reason in lines_of(runner)[-1]
    assert standings(runner)["a-clone-1"] == "failed"
    assert runner._finish().records["a-clone-1"].standing == "failed"


def test_invalid_trial_of_the_file_is_refused(tmp_path: Path) -> None:
    runner = begin(tmp_path, trials=[{"name": "a"}, {"name": "b", **STEPS_OF_A_BATCH}], rungs={"steps": [3]})
    with pytest.raises(ConfigError, match=r"^b: rungs\.steps=3 must be a multiple of"):
        runner.check()


@pytest.mark.parametrize("field", ["data.train", "data.heldout", "model.path"])
def test_trial_whose_files_are_missing_is_refused_unless_it_takes_no_more_steps(
    tmp_path: Path, runs: Run, field: str
) -> None:
    missing = str(tmp_path / ("missing" if field == "model.path" else "missing.jsonl"))
    trials = [{"name": "a"}, {"name": "b", field: missing}]
    runner = begin(tmp_path, trials=trials)
    with pytest.raises(GrpoRayError, match=rf"^b: {field}[=:] ?{missing}: (no such file|there is no such folder)"):
        runner.check()
    state = runner.state.with_standing("b", "dropped", "at step 4")
    begin(tmp_path, state, trials=trials).check()
    runs.stored = {"b": (8, 0.5)}  # its last step
    runner = begin(tmp_path, trials=trials)
    runner.check()
    # A clone that is requested while the sweep runs.
    write_request(runner.folder, SweepRequest(action="clone", trial="a", overrides={field: missing}))
    runner._carry_out_requests()
    assert lines_of(runner)[-1].startswith(f"clone a: a-clone-1: {field}") and standings(runner).keys() == {"a", "b"}


def test_trial_that_a_stop_left_unmeasured_at_a_rung_is_launched_once_more(tmp_path: Path, runs: Run) -> None:
    runner = begin(tmp_path, rungs={"steps": [4], "keep": 0.5})
    runs.stored = {"a": (4, None), "b": (4, 0.25)}
    refresh(runner)
    (launch,) = module.plan_launches(runner._progress(), runner._rung, None, None)
    assert (launch.name, launch.pause_at) == ("a", 4)
    assert not module.is_due(runner._rung, runner._progress())
    runs.stored["a"] = (4, 0.75)  # measured by that launch
    end_driver(runner, "a", launch.pause_at, "run.pause_at")
    assert lines_of(runner) == []
    runner._compare()
    assert standings(runner) == {"a": "active", "b": "dropped"}


def test_value_that_stays_unknown_is_compared_as_such(tmp_path: Path, runs: Run) -> None:
    runner = begin(tmp_path, rungs={"steps": [4], "keep": 0.5})
    runs.stored = {"a": (4, None), "b": (4, 0.25)}
    refresh(runner)
    end_driver(runner, "a", 4, "run.pause_at")
    assert standings(runner) == {"a": "active", "b": "active"} and lines_of(runner) == []
    assert module.plan_launches(runner._progress(), runner._rung, None, None) == []
    assert module.is_due(runner._rung, runner._progress())
    runner._compare()
    assert standings(runner) == {"a": "dropped", "b": "active"}


def test_launch_that_stops_before_the_measurement_is_repeated(tmp_path: Path, runs: Run) -> None:
    runner = begin(tmp_path, rungs={"steps": [4], "keep": 0.5})
    runs.stored = {"a": (4, None), "b": (4, 0.25)}
    refresh(runner)
    runner._write(runner.state.with_standing("a", "stopped", "by the user"))
    end_driver(runner, "a", 4, STOPPED)
    runner._write(runner.state.with_standing("a", "active"))
    assert [each.name for each in module.plan_launches(runner._progress(), runner._rung, None, None)] == ["a"]


def test_driver_that_a_signal_has_stopped_is_launched_again(tmp_path: Path, runs: Run) -> None:
    runner = begin(tmp_path)
    runs.stored = {"a": (2, 0.5)}
    refresh(runner)
    runs.stored = {"a": (3, None)}
    end_driver(runner, "a", None, "SIGTERM")
    assert standings(runner)["a"] == "active" and runner._facts["a"].retry_at > 0
    assert lines_of(runner) == ["a: stopped by SIGTERM; it is launched again from step 3"]
    end_driver(runner, "b", None, "reward_stuck")  # a warning of `run.stop_on`
    assert standings(runner)["b"] == "failed"


def lose_driver(runner: SweepRunner, name: str, reason: str = "its driver has ended without a result") -> None:
    """Let a driver end without a result that was launched at the trial's current step."""
    config = runner._launch_config(runner.state.record(name), None)
    runner._settle(name, module._Running(None, None, config, runner._facts[name].step), reason, True)


def test_trial_that_was_killed_before_its_last_measurement_is_measured(tmp_path: Path, runs: Run) -> None:
    runner = begin(tmp_path)
    runs.stored = {"a": (8, None), "b": (8, 0.25)}
    refresh(runner)
    (launch,) = module.plan_launches(runner._progress(), runner._rung, None, None)
    assert (launch.name, launch.pause_at) == ("a", None) and runner._has_work()
    runs.stored["a"] = (8, 0.75)
    end_driver(runner, "a", None, None)
    assert lines_of(runner) == [] and not runner._has_work()


def test_finished_trial_whose_value_is_unknown_is_not_launched_again(tmp_path: Path, runs: Run) -> None:
    runner = begin(tmp_path)
    runs.stored = {"a": (8, None), "b": (8, None)}
    runs.measured_as_unknown = {"a"}
    refresh(runner)
    assert [each.name for each in module.plan_launches(runner._progress(), None, None, None)] == ["b"]
    end_driver(runner, "b", None, None)  # nothing could be measured
    assert lines_of(runner) == [] and not runner._has_work()


@pytest.mark.parametrize(
    ("case", "line"),
    [
        ("running", "a: its driver has ended without a result; it is launched again from step 4"),
        ("ending", "a: its driver has ended without a result; the next launch of the sweep continues from step 4"),
        ("finished", "a: its driver has ended without a result; all that it had to do up to step 8 is saved"),
        ("stopped", "a: its driver has ended without a result"),
    ],
)
def test_line_about_a_lost_driver_names_the_continuation(tmp_path: Path, runs: Run, case: str, line: str) -> None:
    runner = begin(tmp_path)
    runs.stored = {"a": (8 if case == "finished" else 4, 0.5)}
    refresh(runner)
    if case == "ending":
        runner._stop.received = "SIGINT"
    if case == "stopped":
        runner._write(runner.state.with_standing("a", "stopped", "by the user"))
    lose_driver(runner, "a")
    assert lines_of(runner) == [line]


def test_sweep_that_stops_before_the_first_step_reports_no_lost_driver(tmp_path: Path, runs: Run) -> None:
    runner = begin(tmp_path)
    refresh(runner)
    runner._stop.received = "SIGINT"
    end_driver(runner, "a", None, STOPPED)
    assert lines_of(runner) == [] and standings(runner)["a"] == "active"


class Board:
    """Board of a sweep that records its calls; an answer is an error if it is lost."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.activities: dict[str, TrialActivity] = {}
        self.is_lost = False

    def __getattr__(self, method: str) -> Any:
        def remote(*arguments: Any) -> str:
            self.calls.append((method, *arguments))
            return method

        return SimpleNamespace(remote=remote)

    def get(self, method: str, timeout: float) -> Any:
        """Return the answer to a call, in place of `ray.get`."""
        if self.is_lost:
            raise module.ray.exceptions.ActorDiedError
        return (self.activities, []) if method == "read" else None


@pytest.fixture
def board(monkeypatch: pytest.MonkeyPatch) -> Board:
    """Give the sweep a board, and drivers without a process."""
    board = Board()
    monkeypatch.setattr(module.ray, "get", board.get)
    monkeypatch.setattr(module.ray, "wait", lambda references, **options: ([], references))
    monkeypatch.setattr(module.ray, "kill", lambda actor: board.calls.append(("kill", actor)))
    monkeypatch.setattr(module, "orphaned_placement_groups", list)
    monkeypatch.setattr(module, "start_driver", lambda config, name, *others: (f"driver of {name}", name))
    return board


@pytest.mark.parametrize("whole_sweep", [False, True])
def test_stop_ends_a_trial_that_takes_no_step_at_once(
    tmp_path: Path, runs: Run, board: Board, whole_sweep: bool
) -> None:
    runner = begin(tmp_path, parallel=2)
    runs.stored = {"a": (4, 0.5), "b": (4, 0.5)}
    refresh(runner)
    runner._board = board
    for name in "ab":
        runner._start(module.TrialLaunch(name=name, pause_at=None))
    board.calls.clear()
    # a waits for resources, or starts its engines; b takes steps.
    board.activities = {"a": TrialActivity(takes_no_steps=True), "b": TrialActivity(step=5)}
    runner._wait()
    if whole_sweep:
        runner._stop.received = "SIGINT"
    else:
        for name in "ab":
            write_request(runner.folder, SweepRequest(action="stop", trial=name))
    runner._advance()
    assert list(runner._running) == ["b"]
    assert [call for call in board.calls if call[0] == "kill"] == [("kill", "driver of a")]
    assert ("request_stop", "b") in board.calls
    assert lines_of(runner)[-1] == "a: ended at step 4, since it was not taking a step"
    assert standings(runner) == dict.fromkeys("ab", "active" if whole_sweep else "stopped")
    # The workers of b fail while the stop waits for their step.
    board.activities["b"] = TrialActivity(step=5, takes_no_steps=True)
    runner._wait()
    runner._advance()
    assert runner._running == {}
    if not whole_sweep:  # each of them continues where it was
        runner._write(runner.state.with_standing("a", "active"))
        assert [each.name for each in module.plan_launches(runner._progress(), None, None, None)] == ["a"]


def test_lost_board_ends_neither_the_sweep_nor_a_step(tmp_path: Path, runs: Run, board: Board) -> None:
    runner = begin(tmp_path, parallel=1)
    refresh(runner)
    runner._board = board
    board.is_lost = True
    runner._start(module.TrialLaunch(name="a", pause_at=None))
    assert runner._running == {} and runner._facts["a"].retry_at > 0  # it is launched once there is a board again
    board.is_lost = False
    runner._start(module.TrialLaunch(name="a", pause_at=None))
    board.activities = {"a": TrialActivity(step=5)}
    runner._wait()
    board.is_lost = True
    runner._wait()
    board.is_lost, board.activities = False, {}  # Ray has started it anew
    runner._wait()
    assert runner._rows()[0].step == 5
    runner._stop.received = "SIGINT"
    board.calls.clear()
    runner._advance()
    runner._advance()
    assert list(runner._running) == ["a"]  # which may be in the middle of a step
    assert board.calls == [("request_stop", "a")] * 2  # the board has forgotten an earlier one


def test_driver_reports_to_the_board_if_its_workers_take_steps(board: Board) -> None:
    observer = _BoardObserver(board, "a", ("reward/mean",))
    for event in ("launched", "began", "training", "measured", "failed"):
        observer.event({"event": event, "at": 0.0})
    assert board.calls == [("set_takes_steps", "a", False), ("set_takes_steps", "a", True),
                           ("set_takes_steps", "a", False)]  # fmt: skip


def test_driver_may_be_lost_again_after_a_launch_that_went_well(tmp_path: Path, runs: Run) -> None:
    runner = begin(tmp_path)
    refresh(runner)
    for step in (4, 6, 7, 8):
        lose_driver(runner, "a")
        lose_driver(runner, "a")
        runs.stored["a"] = (step, 0.5)
        end_driver(runner, "a", step, "run.pause_at")
    assert standings(runner)["a"] == "active"
    for _ in range(module.MAX_LOST_DRIVERS + 1):
        lose_driver(runner, "b")
    assert standings(runner)["b"] == "failed"
    runner._write(runner.state.with_standing("b", "active"))  # the user resumes it
    lose_driver(runner, "b")
    assert standings(runner)["b"] == "active"


def test_clone_whose_start_was_deleted_begins_with_a_later_one(tmp_path: Path, runs: Run) -> None:
    state = begin_state(RunFolder(str(tmp_path), "rates"), [SweepTrial(name=name, overrides={}) for name in "ab"])
    clone = TrialRecord(trial=SweepTrial(name="a-clone-1", overrides={}, parent="a"), started_from="checkpoint-000004")
    runner = begin(tmp_path, state.with_record(clone))
    runs.stored = {"a": (4, 0.5)}
    refresh(runner)
    config = runner._launch_config(clone, None)
    error = "run.from_checkpoint=...: is not a complete checkpoint"
    runs.stored["a"] = (6, 0.5)
    runner._settle("a-clone-1", module._Running(None, None, config, 0), error, False)
    assert standings(runner)["a-clone-1"] == "active"
    assert lines_of(runner)[-1] == (
        "a-clone-1: a/checkpoint-000004 was deleted before the clone had loaded it; it is launched again from step 0"
    )
    # A clone that has steps of its own needs the checkpoint no more.
    runs.stored["a-clone-1"] = (2, 0.5)
    runner._settle("a-clone-1", module._Running(None, None, config, 0), "no GPU", False)
    assert runner.state.record("a-clone-1").reason == "no GPU"


def test_clone_of_a_trial_without_a_checkpoint_fails_with_the_mend(tmp_path: Path, runs: Run) -> None:
    state = begin_state(RunFolder(str(tmp_path), "rates"), [SweepTrial(name=name, overrides={}) for name in "ab"])
    clone = TrialRecord(trial=SweepTrial(name="a-clone-1", overrides={}, parent="a"))
    runner = begin(tmp_path, state.with_record(clone))
    refresh(runner)
    runner._start(module.TrialLaunch(name="a-clone-1", pause_at=None))
    reason = "a has no checkpoint yet; resume the clone once it has one"
    assert (standings(runner)["a-clone-1"], lines_of(runner)) == ("failed", [f"a-clone-1 failed: {reason}"])


def test_resources_of_a_dropped_trial_are_not_required(tmp_path: Path, runs: Run) -> None:
    runner = begin(tmp_path, trials=[{"name": "a"}, {"name": "b", "cluster.num_workers": 16}])
    refresh(runner)
    runner._write(runner.state.with_standing("b", "dropped", "at step 4"))
    assert [config.run.name for config in runner._active_configs] == ["a"]


def test_clone_with_tools_ends_the_warm_start_that_trials_without_them_keep(
    tmp_path: Path, runs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code that a policy writes must not reach the servers that fork this user's processes."""
    runner = begin(tmp_path)
    refresh(runner)
    events: list[str] = []
    runner._board = SimpleNamespace(begin=SimpleNamespace(remote=lambda name: None))
    monkeypatch.setattr(module.ray, "get", lambda reference, timeout: reference)
    monkeypatch.setattr(module, "end_warm_start", lambda: events.append("end of the warm start"))

    def start_driver(config: Any, name: str, board: Any, shown: Any) -> tuple[None, None]:
        events.append(name)
        return None, None

    monkeypatch.setattr(module, "start_driver", start_driver)
    runs.stored["a"] = (4, 0.5)
    write_request(runner.folder, SweepRequest(action="clone", trial="a", overrides=TOOLS))
    runner._carry_out_requests()
    for name in ("a", "a-clone-1"):
        runner._start(module.TrialLaunch(name=name, pause_at=None))
    assert events == ["a", "end of the warm start", "a-clone-1"], lines_of(runner)


class Cluster:
    """CPUs of a cluster's nodes, in place of a connection."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, runner: SweepRunner, cpus: float, taken: float):
        self.total = {"CPU": cpus}
        runner._taken = {"CPU": taken, "GPU": 0.0}
        monkeypatch.setattr(module.ray, "cluster_resources", lambda: self.total)


def free_places(runner: SweepRunner, running: str = "") -> int:
    """Return the places for waiting trials; a trial takes three CPUs: two workers, and one beside them."""
    waiting = [each for each in module.plan_launches(runner._progress(), None, None, None) if each.name not in running]
    runner._running = {name: module._Running(None, None, runner._configs[name], 0) for name in running}
    return runner._free_places(waiting)


def test_nodes_that_join_or_are_lost_change_the_number_of_trials(
    tmp_path: Path, runs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = begin(tmp_path, trials=[{"name": name} for name in "abcd"])
    refresh(runner)
    assert module.run_resources(runner._configs["a"]) == {"CPU": 3, "GPU": 0.0}
    cluster = Cluster(monkeypatch, runner, cpus=8, taken=1)
    assert free_places(runner) == 2
    assert free_places(runner, running="ab") == 0
    cluster.total = {"CPU": 8 + 4}  # a node has joined
    assert free_places(runner, running="ab") == 1
    cluster.total = {"CPU": 4}
    assert free_places(runner, running="a") == 0
    assert free_places(runner) == 1


def test_parallel_trials_are_launched_for_an_autoscaler_to_see(
    tmp_path: Path, runs: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = begin(tmp_path, trials=[{"name": name} for name in "abcd"], parallel=3)
    refresh(runner)
    Cluster(monkeypatch, runner, cpus=2, taken=0)
    assert free_places(runner) == 1  # in any case, if none runs
    runner._has_autoscaler = True
    assert free_places(runner) == 3
    assert free_places(runner, running="ab") == 1


def test_command_requests_a_clone_that_the_sweep_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runner = begin(tmp_path)
    runner._write(runner.state)
    folder = str(tmp_path / "rates")
    assert cli.main(["sweep", "clone", folder, "a", "grpo.learning_rate=-1"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("a: a clone is requested, and begins unless its settings are invalid (once the sweep has")
    assert "a-clone-1" not in output
    runner.check()
    runner._carry_out_requests()
    assert lines_of(runner)[0].startswith("clone a: a-clone-1: grpo.learning_rate=-1 must be")
    assert cli.main(["sweep", "clone", folder, "a", "grpo.learning_rat=1"]) == 2
    assert read_requests(runner.folder) == []


def test_folder_of_a_run_is_refused_for_a_sweep(tmp_path: Path) -> None:
    path = tmp_path / "rates.yaml"
    path.write_text("vary: {run.seed: [1, 2]}\n")
    folder = tmp_path / "rates"
    for entry in ("config.yaml", "checkpoint-000004/manifest.json"):
        (folder / entry).parent.mkdir(parents=True)
        (folder / entry).write_text("{}")
        with pytest.raises(ConfigError, match=rf"^{folder} is the folder of a run; set another `name` in the sweep"):
            run_sweep(str(path), [f"run.storage_path={tmp_path}"])
        assert sorted(str(each.relative_to(folder)) for each in folder.rglob("*") if each.is_file()) == [entry]
        shutil.rmtree(folder)
