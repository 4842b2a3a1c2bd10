"""Driver of one trial, in a Ray actor of the sweep's job.

An actor and not a command of its own, because Ray's processes are forked from warm servers only for the job that has
started the cluster (`driver/cluster/warm_start.py`): a launch then takes seconds. The actor ends with the sweep's
process, and everything that it has started ends with the actor.
"""

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from rich.console import Console

from grpo_ray.config.schema import Config
from grpo_ray.driver.cluster.connection import threads_per_worker
from grpo_ray.driver.run import PreparedRun, prepare
from grpo_ray.evaluation.evaluate import worker_environment
from grpo_ray.observers.feed import RunObserver
from grpo_ray.observers.terminal.progress import ProgressLine
from grpo_ray.sweep.board import numbers
from grpo_ray.telemetry.events import TAKES_STEPS

STOP_POLL_SECONDS = 0.5
"""Time between two questions to the board about a requested stop."""
STOPPED = "the sweep"
"""`RunSummary.stopped` of a trial that the sweep has stopped."""


class _BoardFile:
    """Text file whose lines go to the board."""

    encoding = "utf-8"

    def __init__(self, board: Any, trial: str):
        self._board, self._trial, self._rest = board, trial, ""

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            if line.strip():
                self._board.add_line.remote(self._trial, line.rstrip())
        return len(text)

    def flush(self) -> None:
        """Do nothing: complete lines are sent at once."""

    def isatty(self) -> bool:
        return False


class _BoardObserver(RunObserver):
    """Sender of the metrics that the sweep shows, and of the beginning and end of steps, to the board."""

    def __init__(self, board: Any, trial: str, shown: tuple[str, ...]):
        self._board, self._trial, self._shown = board, trial, shown

    def event(self, entry: Mapping[str, Any]) -> None:
        if (takes_steps := TAKES_STEPS.get(entry["event"])) is not None:
            self._board.set_takes_steps.remote(self._trial, takes_steps)

    def step(self, row: Mapping[str, Any], at: float) -> None:
        self._board.add_step.remote(self._trial, int(row["step"]), numbers(row, self._shown))

    def measured(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._board.add_step.remote(self._trial, step, numbers(metrics, self._shown))


class _StopWatch:
    """Thread that passes a requested stop on to the run: `with _StopWatch(...)`."""

    def __init__(self, board: Any, trial: str, run: PreparedRun):
        self._board, self._trial, self._run = board, trial, run
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watches for a stop", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._end.set()

    def _watch(self) -> None:
        while not self._end.wait(STOP_POLL_SECONDS):
            # Ray starts a board that has died anew; without the sweep Ray ends this process.
            with suppress(ray.exceptions.RayError):
                if ray.get(self._board.stop_requested.remote(self._trial)):
                    self._run.request_stop(STOPPED)
                    return


class TrialDriver:
    """Driver of a trial's run, for one launch.

    Args:
        board: handle of the `SweepBoard` actor.
        shown: names of the metrics that the sweep shows.
    """

    def __init__(self, board: Any, trial: str, shown: tuple[str, ...]):
        self._board, self._trial, self._shown = board, trial, shown

    def train(self, config: Config) -> dict[str, Any]:
        """Train as `grpo-ray train` does; return the contents of `summary.json`.

        Raises:
            GrpoRayError: preflight refused the run, or its workers failed permanently.
        """
        console = Console(file=_BoardFile(self._board, self._trial), force_terminal=False, width=200)  # type: ignore[arg-type]
        progress = ProgressLine(config.grpo.max_steps, console, name=config.run.name)
        observer = _BoardObserver(self._board, self._trial, self._shown)
        with (
            prepare(config, progress, observers=[observer]) as run,
            _StopWatch(self._board, self._trial, run),
        ):
            if run.has_steps_left:
                run.fit(run.trainer())
            return asdict(run.finish())


def on_this_node() -> NodeAffinitySchedulingStrategy:
    """Return the placement on the sweep's own node: a node that is lost must not end the sweep."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def start_driver(config: Config, trial: str, board: Any, shown: tuple[str, ...]) -> tuple[Any, Any]:
    """Start the driver of a trial on this node.

    Returns:
        Handle of the actor, and the reference of its summary.
    """
    actor = ray.remote(
        num_cpus=0,
        max_restarts=0,
        scheduling_strategy=on_this_node(),
        # The environment of train workers: such a process is forked with all libraries imported.
        runtime_env={"env_vars": worker_environment(config, threads_per_worker(config))},
    )(TrialDriver).remote(board, trial, shown)
    return actor, actor.train.remote(config)
