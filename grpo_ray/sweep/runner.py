"""Loop of a sweep: launches trials, compares them at rungs, carries out the user's requests, and shows a table."""

import math
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import ray
from ray.util.placement_group import remove_placement_group

from grpo_ray.config.schema import Config
from grpo_ray.config.sweep_file import SweepConfig, load_sweep
from grpo_ray.driver.cluster.connection import ClusterWatch, connect, require_resources, run_resources
from grpo_ray.driver.cluster.warm_start import end_warm_start
from grpo_ray.driver.preflight.names import check_functions, require_files
from grpo_ray.driver.summary import PAUSED
from grpo_ray.errors import ConfigError, GrpoRayError, TakenRunError, TrainingError
from grpo_ray.resilience.error_triage import describe_worker_error
from grpo_ray.resilience.hangup import survives_hangup
from grpo_ray.resilience.ray_internals import has_autoscaler, orphaned_placement_groups
from grpo_ray.storage import checkpoints
from grpo_ray.storage.jsonl import restore_metrics
from grpo_ray.storage.lease import RunLease
from grpo_ray.storage.numbers import to_finite
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.sweep import requests as user_requests
from grpo_ray.sweep.board import SweepBoard, TrialActivity
from grpo_ray.sweep.halving import choose
from grpo_ray.sweep.results import TrialResult, count_pairs, rank_trials, write_page, write_results
from grpo_ray.sweep.schedule import TrialLaunch, TrialProgress, is_due, next_rung, plan_launches
from grpo_ray.sweep.state import RungDecision, SweepState, TrialRecord, begin_state, require_no_run
from grpo_ray.sweep.table import SweepScreen, TableRow
from grpo_ray.sweep.trial_process import STOPPED, on_this_node, start_driver
from grpo_ray.sweep.trials import TrialConfigs, list_trials

POLL_SECONDS = 0.5
"""Time between two looks at the trials."""
REQUEST_SECONDS = 2.0
"""Time between two looks at the user's requests, each of which costs a request to an object store."""
MAX_LOST_DRIVERS = 3
"""Launches in a row without a new step in which the driver of a trial may end without a result."""
ORPHAN_SECONDS = 120.0
"""Time after the end of a driver in which the processes that it has started end too."""
BOARD_SECONDS = 30.0
"""Time limit of an answer of the board."""
BOARD_LOST = (ray.exceptions.GetTimeoutError, ray.exceptions.RayActorError)
"""Errors of a board that has died, which Ray starts anew, or that gives no answer in time."""
RETRY_SECONDS = 5.0
"""Time until a trial is launched again whose driver has ended without a result, or is still ending elsewhere."""


@dataclass(frozen=True, kw_only=True)
class SweepSummary:
    """Result of a launch of `grpo-ray sweep`."""

    results: Sequence[TrialResult]
    """All trials, the best one first."""
    records: Mapping[str, TrialRecord]
    page: str | None
    """Path of the page with the curves; None if there is none."""
    stopped: str | None
    """Name of the signal that stopped the sweep; None if it has ended by itself."""

    @property
    def comparisons(self) -> int:
        """Number of comparisons that the p-values are corrected for."""
        return count_pairs(self.results)


@dataclass
class _Running:
    """Trial with a driver."""

    actor: Any
    summary: Any
    """Reference of the contents of `summary.json`."""
    config: Config
    since: int
    """Step that the launch began with."""


@dataclass
class _TrialFacts:
    """Facts about a trial that are read from its run folder after each launch."""

    step: int = 0
    value: float | None = None
    """Metric that trials are compared by, of the latest checkpoint."""
    was_measured: bool = False
    """True if the held-out sets were measured for the latest checkpoint, although the value may be unknown."""
    retry_at: float = 0.0
    """Time of the monotonic clock before which the trial is not launched."""
    lost_drivers: int = 0
    measured_at: int | None = None
    """Step after which the trial was launched once more to be measured; a value that is still missing stays unknown."""


@dataclass
class SweepStop:
    """Stop of the whole sweep, requested by a signal: the first one is graceful."""

    received: str | None = None
    _previous: dict[int, Any] = field(default_factory=dict)

    @contextmanager
    def handling(self, notify: Any) -> Iterator[None]:
        """Handle SIGINT and SIGTERM inside the block; outside the main thread, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            if self.received is not None:
                raise KeyboardInterrupt
            self.received = signal.Signals(number).name
            notify(
                f"{self.received}: the sweep stops once the current step of each trial is finished and saved; trials "
                "that take no step end at once; send the signal again to stop immediately"
            )

        numbers = (signal.SIGINT, signal.SIGTERM)
        self._previous = {number: signal.signal(number, handle) for number in numbers}
        try:
            yield
        finally:
            for number, handler in self._previous.items():
                signal.signal(number, handler)


def run_sweep(path: str, overrides: Sequence[str] = ()) -> SweepSummary:
    """Run the trials of a sweep file, or continue them.

    Args:
        path: sweep file.
        overrides: overrides of the base config, for all trials.

    Raises:
        ConfigError: the file or the config of a trial is invalid, the sweep is running already, or it was begun with
            other trials.
        TrainingError: the cluster was lost.
    """
    sweep = load_sweep(path)
    assert sweep.name is not None  # `load_sweep` sets it
    metric = None if sweep.rungs is None else sweep.rungs.metric
    configs = TrialConfigs(sweep.base, overrides, sweep.name, metric)
    folder = RunFolder(*configs.folder, configs.base.run.storage_retry_seconds)
    require_no_run(folder)
    with survives_hangup(), SweepScreen() as screen, _lease(folder, screen.notice) as lease:
        state = begin_state(folder, list_trials(sweep))
        runner = SweepRunner(sweep, configs, folder, lease, state, screen)
        runner.check()
        return runner.run()


@contextmanager
def _lease(folder: RunFolder, notify: Any) -> Iterator[RunLease]:
    """Take the sweep's folder for this process. Raises ConfigError if another one has it."""
    try:
        lease = RunLease.acquire(folder, None, notify)
    except TakenRunError as error:
        holder = str(error).partition("has a driver already: ")[2].partition("; set")[0]
        raise ConfigError(
            f"the sweep {folder.uri} is running already: {holder}; use `grpo-ray sweep stop`, `resume` and `clone`, or "
            "end that process first"
        ) from None
    with lease:
        yield lease


class SweepRunner:
    """Sweep that has a folder and a lease."""

    def __init__(
        self,
        sweep: SweepConfig,
        configs: TrialConfigs,
        folder: RunFolder,
        lease: RunLease,
        state: SweepState,
        screen: SweepScreen,
    ):
        self.sweep, self.configs, self.folder, self.lease, self.screen = sweep, configs, folder, lease, screen
        self.state = state
        self.metric = configs.base.ranking_metric
        self._configs: dict[str, Config] = {}
        """Trial -> its config without pauses; an invalid clone has none."""
        self._checked: set[str] = set()
        """Settings whose functions have been loaded, as text."""
        self._facts: dict[str, _TrialFacts] = {}
        self._running: dict[str, _Running] = {}
        self._stop = SweepStop()
        self._lost: str | None = None
        self._activities: Mapping[str, TrialActivity] = {}
        self._taken: dict[str, float] = {}
        """CPUs and GPUs that others held when the sweep has connected."""
        self._has_autoscaler = False
        self._board: Any = None
        self._next_requests = 0.0
        """Time of the monotonic clock of the next look for requests."""
        self._orphans_until = 0.0
        """Time of the monotonic clock until which a driver that has ended by an error may leave resources behind."""

    def check(self) -> None:
        """Check the config of every trial before anything starts; an invalid clone fails. Raises GrpoRayError."""
        rungs = self.sweep.rungs.steps if self.sweep.rungs is not None else ()
        for record in self.state.records:
            try:
                self._check_trial(record)
            except GrpoRayError as error:
                name, reason = record.trial.name, _first_line(error).removeprefix(f"{record.trial.name}: ")
                if record.trial.parent is None:
                    raise
                if record.standing == "active":
                    self.state = self.state.with_standing(name, "failed", reason)
                self.screen.notice(f"{name} takes no part: {reason}")
        if rungs and rungs[0] >= max(config.grpo.max_steps for config in self._configs.values()):
            raise ConfigError(
                f"rungs.steps={list(rungs)}: no trial is compared, since grpo.max_steps is not above them; set smaller "
                "ones"
            )

    def _check_trial(self, record: TrialRecord) -> None:
        """Check the config of a trial, its pauses, and the functions and files that it names, and keep it.

        A trial that takes no more steps needs no files. Raises GrpoRayError; the message begins with the trial's name.
        """
        name = record.trial.name
        rungs = self.sweep.rungs.steps if self.sweep.rungs is not None else ()
        config = self.configs.config_of(record.trial)
        for step in (*rungs, *((self.sweep.turns,) if self.sweep.turns else ())):
            try:  # a step may be in the middle of a generation batch
                replace(config, run=replace(config.run, pause_at=step))
            except ConfigError as error:
                message = f"{error}".replace("run.pause_at", "rungs.steps" if step in rungs else "turns")
                raise ConfigError(f"{name}: {message}") from None
        if name not in self._facts:
            self._refresh(name)
        try:
            if (functions := repr((config.rewards, config.rollout, config.heldout, config.data))) not in self._checked:
                check_functions(config)
                self._checked.add(functions)
            if record.standing == "active" and self._facts[name].step < config.grpo.max_steps:
                require_files(config)
        except GrpoRayError as error:
            raise type(error)(f"{name}: {error}") from None
        self._configs[name] = config

    def run(self) -> SweepSummary:
        """Run the loop until no trial has steps left, or until a signal stops the sweep."""
        for name in self.state.names:
            if name not in self._facts:  # of a clone that is invalid by now
                self._refresh(name)
        self._write(self.state)
        self._carry_out_requests()
        if not self._has_work():  # the results of an earlier launch
            return self._finish()
        self._connect()
        try:
            with self._stop.handling(self.screen.notice), ClusterWatch(self._set_lost):
                while True:
                    self._advance()
                    if not self._running and not self._has_work():
                        break
                    self._wait()
            self._free_resources()
        finally:
            self._end_drivers()
        return self._finish()

    def _connect(self) -> None:
        configs = self._active_configs
        largest = max(configs, key=lambda config: run_resources(config)["CPU"])
        for line in connect(largest, runs=self.sweep.parallel or 1):
            self.screen.notice(line)
        for config in {repr(config.cluster): config for config in configs}.values():
            if notice := require_resources(config):
                self.screen.notice(notice)
        self._has_autoscaler = has_autoscaler()
        total, free = ray.cluster_resources(), ray.available_resources()
        self._taken = {name: total.get(name, 0.0) - free.get(name, 0.0) for name in ("CPU", "GPU")}
        # Ray starts it anew if it dies, for example because its node is low on memory.
        actor = ray.remote(num_cpus=0, max_restarts=-1, scheduling_strategy=on_this_node())(SweepBoard)
        self._board = actor.remote()

    @property
    def _active_configs(self) -> list[Config]:
        """Configs of the trials that need resources: those that were dropped or stopped may not fit any more."""
        return [self._configs[record.trial.name] for record in self.state.active]

    def _set_lost(self, process: str) -> None:
        self._lost = process

    def _config_or_base(self, name: str) -> Config:
        """Return the config of a trial to show its results; an invalid clone is shown with the base config."""
        return self._configs.get(name, self.configs.base)

    def _launch_config(self, record: TrialRecord, pause_at: int | None) -> Config:
        """Return the config of a trial's next launch; a clone begins with a checkpoint of its parent."""
        config = self._configs[record.trial.name]
        start = config.run.from_checkpoint
        if record.started_from is not None:
            start = self._trial_folder(record.trial.parent or "").address_of(record.started_from)
        return replace(config, run=replace(config.run, pause_at=pause_at, from_checkpoint=start))

    def _trial_folder(self, name: str) -> RunFolder:
        return RunFolder(self.folder.address_of(), name, self.folder.retry_seconds)

    def _refresh(self, name: str) -> None:
        """Read the steps and the metric of a trial from its run folder."""
        facts = self._facts.setdefault(name, _TrialFacts())
        stored = checkpoints.list_checkpoints(self._trial_folder(name))
        facts.step = stored[-1].step if stored else 0
        facts.value = to_finite(stored[-1].metrics.get(self.metric)) if stored else None
        facts.was_measured = bool(stored) and stored[-1].measured_on is not None

    def _write(self, state: SweepState) -> None:
        """Record a state, unless another process has taken the sweep over."""
        self.lease.confirm()
        state.write(self.folder)
        self.state = state

    def _progress(self) -> list[TrialProgress]:
        """Return the positions of the active trials."""
        return [
            TrialProgress(
                name=name,
                step=self._facts[name].step,
                max_steps=self._configs[name].grpo.max_steps,
                is_running=name in self._running,
                is_unmeasured=self._is_unmeasured(name),
            )
            for name in (each.trial.name for each in self.state.active)
        ]

    def _is_unmeasured(self, name: str) -> bool:
        """Return True if a launch could measure the latest checkpoint of a trial, which has no value."""
        facts = self._facts[name]
        if facts.value is not None or facts.measured_at == facts.step:
            return False
        # After its last step, a run measures only a checkpoint that was never measured (`PreparedRun.finish`).
        return facts.step < self._configs[name].grpo.max_steps or not facts.was_measured

    @property
    def _rung(self) -> int | None:
        rungs = self.sweep.rungs.steps if self.sweep.rungs is not None else ()
        return next_rung(rungs, [each.step for each in self.state.decisions])

    def _has_work(self) -> bool:
        """Return True if a trial could take steps now or after a pause of a few seconds."""
        if self._stop.received is not None:
            return False
        return bool(plan_launches(self._progress(), self._rung, None, None)) or is_due(self._rung, self._progress())

    def _advance(self) -> None:
        """Take in everything that has happened, and launch what may be launched."""
        self._collect()
        if time.monotonic() >= self._next_requests:
            self._carry_out_requests()
            self._next_requests = time.monotonic() + REQUEST_SECONDS
        if time.monotonic() < self._orphans_until:  # the processes of a driver end some time after it
            self._free_resources()
        for name in list(self._running):
            if self._stop.received is not None or self.state.record(name).standing != "active":
                self._stop_trial(name)
        if self._stop.received is not None:
            return
        while is_due(self._rung, self._progress()):
            self._compare()
        self._launch()

    def _stop_trial(self, name: str) -> None:
        """Have a trial end after its current step, which is saved, or at once if it takes none.

        Only workers that take steps look for a stop: not a run that waits for resources, starts engines or measures
        before its first step, which has nothing to save.
        """
        self._board.request_stop.remote(name)  # again and again: a board that Ray has started anew has no requests
        if not self._activities.get(name, TrialActivity()).takes_no_steps:
            return
        running = self._running.pop(name)
        with suppress(ray.exceptions.RayError):
            ray.kill(running.actor)
        self._settle(name, running, None, False)
        self._orphans_until = time.monotonic() + ORPHAN_SECONDS
        self.screen.notice(f"{name}: ended at step {self._facts[name].step}, since it was not taking a step")

    def _compare(self) -> None:
        """Compare the active trials at the next rung, and drop the worst."""
        rung, rungs = self._rung, self.sweep.rungs
        assert rung is not None and rungs is not None
        values = {each.trial.name: self._facts[each.trial.name].value for each in self.state.active}
        kept = choose(values, rungs.keep)
        dropped = [name for name in values if name not in kept]
        for name in dropped:  # no launch follows that would add the rows which a killed sweep has not written
            folder = self._trial_folder(name)
            if stored := checkpoints.list_checkpoints(folder):
                restore_metrics(folder, stored[-1].name, stored[-1].step)
        self._write(self.state.with_decision(RungDecision(step=rung, values=values, kept=kept)))
        self.screen.notice(f"step {rung}: {', '.join(kept)} stay; {', '.join(dropped) or 'none'} dropped")

    def _launch(self) -> None:
        now = time.monotonic()
        ready = [each for each in self._progress() if each.is_running or self._facts[each.name].retry_at <= now]
        waiting = plan_launches(ready, self._rung, None, None)
        free = self._free_places(waiting)
        if free:
            for launch in plan_launches(ready, self._rung, self.sweep.turns, free):
                self._start(launch)

    def _free_places(self, waiting: Sequence[TrialLaunch]) -> int:
        """Return how many of the waiting trials, the first ones, may be launched now.

        Each trial is counted with all that it may take, so that none waits with its workers for the CPU of Ray Data.
        Ray decides about the places. A trial is launched in any case if none runs.
        """
        places = len(waiting) if self.sweep.parallel is None else self.sweep.parallel - len(self._running)
        if not waiting or places <= 0:
            return 0
        left = self._capacity()
        for running in self._running.values():
            for resource, amount in run_resources(running.config).items():
                left[resource] -= amount
        count = 0
        for launch in waiting[:places]:
            needed = run_resources(self._configs[launch.name])
            fits = all(left[resource] >= amount for resource, amount in needed.items())
            if not fits and (count or self._running):
                break
            for resource, amount in needed.items():
                left[resource] -= amount
            count += 1
        return count

    def _capacity(self) -> dict[str, float]:
        """Return the CPUs and GPUs that all trials together may take now: nodes may have joined or been lost.

        Unlimited if the user has set a number of trials and an autoscaler may add nodes for them: it adds none unless
        their workers wait for resources.
        """
        if self._has_autoscaler and self.sweep.parallel is not None:
            return dict.fromkeys(self._taken, math.inf)
        total = ray.cluster_resources()
        return {name: total.get(name, 0.0) - taken for name, taken in self._taken.items()}

    def _start(self, launch: TrialLaunch) -> None:
        """Launch a trial."""
        name = launch.name
        record = self.state.record(name)
        if record.trial.parent is not None and self._facts[name].step == 0:
            stored = checkpoints.list_checkpoints(self._trial_folder(record.trial.parent))
            if not stored:
                self._fail(name, f"{record.trial.parent} has no checkpoint yet; resume the clone once it has one")
                return
            record = replace(record, started_from=stored[-1].name)
            self._write(self.state.with_record(record))
        config = self._launch_config(record, launch.pause_at)
        if config.rollout.has_conversations:
            # Code of a policy is about to run in processes of this user (`driver/cluster/warm_start.py`). A run by
            # itself waits until its workers have started; here others start later.
            end_warm_start()
        try:
            ray.get(self._board.begin.remote(name), timeout=BOARD_SECONDS)
        except BOARD_LOST:  # it may still have a request to stop the trial
            self._facts[name].retry_at = time.monotonic() + RETRY_SECONDS
            return
        actor, summary = start_driver(config, name, self._board, self._shown)
        self._running[name] = _Running(actor, summary, config, self._facts[name].step)

    @property
    def _shown(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.metric, "reward/mean", f"{self.configs.base.primary_heldout}/accuracy")))

    def _fail(self, name: str, reason: str) -> None:
        self._facts[name].lost_drivers = 0  # the user may resume it
        self._write(self.state.with_standing(name, "failed", reason))
        self.screen.notice(f"{name} failed: {reason}")

    def _collect(self) -> None:
        """Take in the results of drivers that have ended."""
        if self._lost is not None:
            raise TrainingError(
                f"the Ray cluster was lost: its process {self._lost} has ended; steps since the last checkpoint of "
                "each trial are lost\nrun the same command again to continue"
            )
        references = [running.summary for running in self._running.values()]
        ended, _ = ray.wait(references, num_returns=len(references), timeout=0) if references else ([], [])
        for name, running in list(self._running.items()):
            if running.summary in ended:
                del self._running[name]
                self._take_in(name, running)

    def _take_in(self, name: str, running: _Running) -> None:
        """Take in the end of one driver."""
        reason, may_return = None, False
        try:
            reason, may_return = reason_of_stop(ray.get(running.summary)["stopped"])
        except TakenRunError as error:  # the driver of a sweep that was killed is about to end
            reason, may_return = _first_line(error), True
        except GrpoRayError as error:
            reason = _first_line(error)
        except ray.exceptions.RayActorError:
            reason, may_return = "its driver has ended without a result", True
        except ray.exceptions.RayError as error:  # an error of any library in the driver
            reason = describe_worker_error(error)
        except Exception as error:  # Ray raises the driver's own error, of any class
            reason = describe_worker_error(error)
        ray.kill(running.actor)
        self._settle(name, running, reason, may_return)

    def _settle(self, name: str, running: _Running, reason: str | None, may_return: bool) -> None:
        """Decide about a trial whose driver has ended.

        Args:
            reason: None if the driver has ended as it should.
            may_return: with such a reason the trial may be launched again.
        """
        self._refresh(name)
        facts = self._facts[name]
        is_active = self.state.record(name).standing == "active"
        if reason is not None:
            self._orphans_until = time.monotonic() + ORPHAN_SECONDS
            if (deleted := self._deleted_start(name)) is not None:
                reason, may_return = f"{deleted} was deleted before the clone had loaded it", True
        elif facts.step == running.since and is_active and self._stop.received is None:
            if facts.step >= running.config.last_step:  # the launch was for a measurement only
                facts.measured_at = facts.step
            else:
                reason, may_return = "its driver has ended without a step", True
        took_steps = facts.step > running.since
        facts.lost_drivers = 0 if took_steps or reason is None else facts.lost_drivers + 1
        if reason is None:
            return
        if not is_active:  # the user has stopped it meanwhile
            self.screen.notice(f"{name}: {reason}")
        elif may_return and facts.lost_drivers <= MAX_LOST_DRIVERS:
            facts.retry_at = time.monotonic() + RETRY_SECONDS
            self.screen.notice(f"{name}: {reason}; {self._continuation(name)}")
        else:
            self._fail(name, reason)

    def _continuation(self, name: str) -> str:
        """Return the end of a line about an active trial whose driver is lost."""
        step = self._facts[name].step
        if self._stop.received is not None:
            return f"the next launch of the sweep continues from step {step}"
        if any(launch.name == name for launch in plan_launches(self._progress(), self._rung, None, None)):
            return f"it is launched again from step {step}"
        return f"all that it had to do up to step {step} is saved"

    def _deleted_start(self, name: str) -> str | None:
        """Return the checkpoint that a clone without steps was to begin with, if its parent has deleted it since."""
        record = self.state.record(name)
        if record.started_from is None or record.trial.parent is None or self._facts[name].step > 0:
            return None
        stored = checkpoints.list_checkpoints(self._trial_folder(record.trial.parent))
        is_there = any(each.name == record.started_from for each in stored)
        return None if is_there else f"{record.trial.parent}/{record.started_from}"

    def _free_resources(self) -> None:
        """Free the resources that a driver has left behind, which has not ended by itself."""
        for group in orphaned_placement_groups():
            with suppress(ray.exceptions.RayError):  # it has just been removed
                remove_placement_group(group)

    def _carry_out_requests(self) -> None:
        for request_id, request in user_requests.read_requests(self.folder):
            if request_id not in self.state.requests:
                self._carry_out(request_id, request)
            user_requests.delete_request(self.folder, request_id)

    def _carry_out(self, request_id: str, request: user_requests.SweepRequest | None) -> None:
        """Carry out one request, and record that."""
        state = self.state.with_request(request_id)
        if request is None:
            self.screen.notice(f"the request {request_id} cannot be read, and is left out")
            self._write(state)
            return
        try:
            changed, line = user_requests.apply_request(state, request)
            for record in changed.records:
                if record.trial.name not in self._configs and record.standing == "active":
                    self._check_trial(record)  # refuses a clone with invalid settings, and to resume one
        except GrpoRayError as error:
            changed, line = state, f"{request.action} {request.trial}: {error}"
        self._write(changed)
        for record in changed.records:
            self._facts.setdefault(record.trial.name, _TrialFacts())
        self.screen.notice(line)

    def _wait(self) -> None:
        """Wait a moment, or until a driver ends; show the table."""
        references = [running.summary for running in self._running.values()]
        if references:
            ray.wait(references, num_returns=1, timeout=POLL_SECONDS)
        else:
            time.sleep(POLL_SECONDS)
        with suppress(*BOARD_LOST):  # the table keeps its values until the drivers send others
            activities, lines = ray.get(self._board.read.remote(), timeout=BOARD_SECONDS)
            self._activities = {**self._activities, **activities}
            for name, line in lines:
                self.screen.line(name, line)
        self.screen.show(self._rows())

    def _rows(self) -> list[TableRow]:
        rows = []
        for record in self.state.records:
            name, facts = record.trial.name, self._facts[record.trial.name]
            activity = self._activities.get(name, TrialActivity())
            is_running = name in self._running
            max_steps = self._config_or_base(name).grpo.max_steps
            standing: str = record.standing if record.standing != "active" else "waiting"
            if is_running:
                standing = "running" if record.standing == "active" else "stopping"
            elif record.standing == "active" and facts.step >= max_steps:
                standing = "finished"
            rows.append(
                TableRow(
                    name=name,
                    settings=record.trial.text,
                    standing=standing,
                    step=max(facts.step, activity.step if is_running else 0),
                    max_steps=max_steps,
                    value=activity.metrics.get(self.metric, facts.value) if is_running else facts.value,
                    reward=activity.metrics.get("reward/mean"),
                    line=activity.line if is_running else record.reason,
                )
            )
        return rows

    def _end_drivers(self) -> None:
        """End the drivers that still run, because of an error or a second signal, and free their resources."""
        if not self._running or self._lost is not None:
            return
        for running in self._running.values():
            with suppress(ray.exceptions.RayError):
                ray.kill(running.actor)
        self._running.clear()
        with suppress(ray.exceptions.RayError):
            self._free_resources()

    def _finish(self) -> SweepSummary:
        """Rank the trials, and write the result and the page."""
        folders = {name: self._trial_folder(name) for name in self.state.names}
        results = rank_trials(self.state, {name: self._config_or_base(name) for name in self.state.names}, folders)
        self.lease.confirm()
        write_results(self.folder, results, self.state)
        page = write_page(self.folder, results, folders)
        self.screen.show(self._rows())
        return SweepSummary(
            results=results,
            records={record.trial.name: record for record in self.state.records},
            page=page,
            stopped=self._stop.received,
        )


def reason_of_stop(stopped: str | None) -> tuple[str | None, bool]:
    """Return the reason why a run has ended before the step of its launch, and True if it may be launched again.

    Args:
        stopped: `RunSummary.stopped`.
    """
    if stopped in (None, STOPPED, PAUSED):
        return None, False
    # A signal to the driver itself is as good as its death; a warning of `run.stop_on` is meant.
    return f"stopped by {stopped}", stopped in signal.Signals.__members__


def _first_line(error: GrpoRayError) -> str:
    """Return the first line of a driver's error; Ray puts a traceback before it, and the error itself in `cause`."""
    return str(getattr(error, "cause", error)).splitlines()[0]
