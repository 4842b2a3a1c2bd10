"""Tests of the delivery to trackers, with trackers that keep everything in memory."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from grpo_ray.observers.feed import RunFeed
from grpo_ray.observers.follower import RunFiles
from grpo_ray.observers.trackers import dispatcher
from grpo_ray.observers.trackers.dispatcher import TrackerDispatcher
from grpo_ray.observers.trackers.history import EventList, TrackerFile
from grpo_ray.observers.trackers.tracker import Position, StepEntry, TrackedRun, Tracker
from grpo_ray.storage.run_folder import RunFolder

WAIT_SECONDS = 60.0


class MemoryStore:
    """The server of `MemoryTracker`: metrics by step, of all trackers that were opened."""

    def __init__(self) -> None:
        self.rows: dict[int, dict[str, float]] = {}
        self.heldout: dict[int, dict[str, float]] = {}
        self.events: list[str] = []
        self.summary: dict[str, object] = {}
        self.opened: list[str] = []
        self.closed: list[bool] = []
        self.times: dict[int, float] = {}
        self.flushes = self.failures = 0


class MemoryTracker(Tracker):
    """Tracker that can overwrite, as TensorBoard can."""

    def __init__(self, store: MemoryStore) -> None:
        self.store = store

    def open(self, run: TrackedRun, saved: Position) -> Position:
        self.store.opened.append(run.id)
        self.rewind(saved.step)
        return saved

    def log(self, entry: StepEntry) -> None:
        assert entry.step not in self.store.rows, "a step came twice"
        self.store.rows[entry.step] = dict(entry.metrics)

    def log_heldout(self, step: int, metrics: Mapping[str, Any], at: float) -> None:
        self.store.heldout[step] = dict(metrics)

    def rewind(self, step: int) -> bool:
        self.store.rows = {each: row for each, row in self.store.rows.items() if each <= step}
        return True

    def log_events(self, step: int, events: Sequence[str]) -> None:
        self.store.events = list(events)

    def finish(self, step: int, summary: Mapping[str, Any]) -> None:
        self.store.summary = dict(summary)

    def close(self, *, is_complete: bool) -> None:
        self.store.closed.append(is_complete)


class AppendOnlyTracker(MemoryTracker):
    """Tracker that knows its last step and cannot remove metrics, as MLflow's."""

    def rewind(self, step: int) -> bool:
        return False

    def open(self, run: TrackedRun, saved: Position) -> Position:
        self.store.opened.append(run.id)
        return Position(max(self.store.rows, default=0), max(self.store.heldout, default=-1))


class BufferedTracker(MemoryTracker):
    """Tracker that writes at each `flush`, as TensorBoard does to an object store; it loses the rest when it fails."""

    flush_seconds = 1000.0

    def __init__(self, store: MemoryStore) -> None:
        super().__init__(store)
        self.unwritten: list[Callable[[], None]] = []

    def log(self, entry: StepEntry) -> None:
        self.unwritten.append(partial(super().log, entry))
        self.unwritten.append(lambda: self.store.times.update({entry.step: entry.at}))

    def log_heldout(self, step: int, metrics: Mapping[str, Any], at: float) -> None:
        self.unwritten.append(partial(super().log_heldout, step, metrics, at))

    def finish(self, step: int, summary: Mapping[str, Any]) -> None:
        self.unwritten.append(partial(super().finish, step, summary))

    def flush(self) -> None:
        if self.store.failures:
            self.store.failures -= 1
            raise OSError("no space")
        for write in self.unwritten:
            write()
        self.unwritten.clear()
        self.store.flushes += 1


class BrokenTracker(MemoryTracker):
    """Tracker whose every method raises until it is mended."""

    works = threading.Event()

    def open(self, run: TrackedRun, saved: Position) -> Position:
        if not self.works.is_set():
            raise ConnectionError("no server\nwith a second line and hf_abcdefghijklmnopqrstuvwxyz")
        return super().open(run, saved)


class HangingTracker(MemoryTracker):
    """Tracker whose `log` does not return until it is let go."""

    released = threading.Event()

    def log(self, entry: StepEntry) -> None:
        self.released.wait()
        super().log(entry)


@pytest.fixture(autouse=True)
def _quick_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(dispatcher, "LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(dispatcher, "RECOVERY_PAUSE", 0.01)
    BrokenTracker.works = threading.Event()
    HangingTracker.released = threading.Event()


class Driver:
    """A driver's part of a run: its files and its trackers, fed as the follower feeds them."""

    def __init__(self, folder: RunFolder, trackers: dict[str, Callable[[], Tracker]], **limits: Any) -> None:
        self.notices: list[str] = []

        def describe(run_id: str) -> TrackedRun:
            return TrackedRun(id=run_id, name="run", project=None, config={}, tags={}, folder=folder)

        self.trackers = TrackerDispatcher(
            list(trackers),
            TrackerFile(folder, folder.name),
            EventList(folder),
            describe,
            self.notices.append,
            lambda name: trackers[name](),
            **limits,
        )
        self.feed = RunFeed([RunFiles(folder, self.notices.append), self.trackers])
        self.feed.event({"event": "launched", "at": 1.0})

    def resume(self, step: int) -> None:
        self.feed.event({"event": "began", "at": 2.0, "step": step, "workers": 2})
        self.feed.resumed(step, [])

    def take(self, *steps: int, reward: float = 0.0) -> None:
        for step in steps:
            self.feed.step({"step": step, "reward/mean": step + reward}, 100.0 + step)

    def end(self, *, finished: bool = True) -> None:
        self.feed.flush()
        if finished:
            self.feed.finished({"steps": 6, "best_checkpoint": "checkpoint-6"})
        self.feed.close()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        time.sleep(0.005)


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(str(tmp_path), "run")


def rewards(store: MemoryStore) -> dict[int, float]:
    return {step: row["reward/mean"] for step, row in store.rows.items()}


def test_dispatcher_run_reaches_every_tracker_whole(folder: RunFolder) -> None:
    stores = {"a": MemoryStore(), "b": MemoryStore()}
    trackers: dict[str, Callable[[], Tracker]] = {name: partial(MemoryTracker, store) for name, store in stores.items()}
    driver = Driver(folder, trackers)
    driver.resume(0)
    driver.feed.event({"event": "baseline", "at": 3.0, "metrics": {"heldout/accuracy": 0.25}})
    driver.take(1, 2)
    driver.feed.measured(2, {"heldout/accuracy": 0.5})
    driver.feed.event({"event": "failed", "at": 4.0, "rank": 1, "what": "boom"})
    driver.end()
    for store in stores.values():
        assert rewards(store) == {1: 1.0, 2: 2.0}
        assert store.heldout == {0: {"heldout/accuracy": 0.25}, 2: {"heldout/accuracy": 0.5}}
        assert [line.split("UTC  ")[1] for line in store.events] == [
            "launched", "training from step 0 with 2 workers", "worker 1 failed: boom",
        ]  # fmt: skip
        assert store.summary["best_checkpoint"] == "checkpoint-6" and store.closed == [True]
    assert stores["a"].opened == stores["b"].opened  # one id for all trackers


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        # Steps 3 and 4 are taken again with other values: overwritten, or kept where nothing can be removed.
        (MemoryTracker, {1: 1.0, 2: 2.0, 3: 3.5, 4: 4.5, 5: 5.5}),
        (AppendOnlyTracker, {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.5}),
    ],
)
def test_dispatcher_steps_taken_again_are_not_doubled(folder: RunFolder, cls: Any, expected: dict[int, float]) -> None:
    store = MemoryStore()
    driver = Driver(folder, {"a": lambda: cls(store)})
    driver.resume(0)
    driver.take(1, 2, 3, 4)
    driver.resume(2)
    driver.take(3, 4, 5, reward=0.5)
    driver.end()
    assert rewards(store) == expected


@pytest.mark.parametrize("cls", [MemoryTracker, AppendOnlyTracker])
@pytest.mark.parametrize("saved", [0, 2, 4])
def test_dispatcher_killed_driver_next_one_sends_what_is_missing(folder: RunFolder, cls: Any, saved: int) -> None:
    # The driver died when the files had 4 steps, the tracker had 3, and the saved position was older, equal or newer.
    store = MemoryStore()
    driver = Driver(folder, {"a": lambda: cls(store)})
    driver.resume(0)
    driver.take(1, 2, 3, 4)
    driver.end(finished=False)
    store.rows.pop(4)
    TrackerFile(folder, "run").save("a", Position(min(saved, 3)))
    again = Driver(folder, {"a": lambda: cls(store)})
    again.resume(4)
    again.take(5)
    again.end()
    assert rewards(store) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}
    assert len(set(store.opened)) == 1
    assert store.closed == [False, True]


@pytest.mark.parametrize("cls", [MemoryTracker, AppendOnlyTracker])
def test_dispatcher_measure_taken_before_the_resume_comes_with_its_step(folder: RunFolder, cls: Any) -> None:
    # A driver measures the checkpoint that it resumes from; the tracker has none of the killed driver's steps.
    store = MemoryStore()
    first = Driver(folder, {})
    first.resume(0)
    first.take(1)
    first.feed.step({"step": 2, "reward/mean": 2.0, "heldout/accuracy": 0.25}, 102.0)
    first.take(3, 4)
    again = Driver(folder, {"a": lambda: cls(store)})
    again.feed.measured(4, {"heldout/accuracy": 0.5})
    again.resume(4)
    again.end(finished=False)
    assert store.heldout == {} and sorted(store.rows) == [1, 2, 3, 4]
    assert [row.get("heldout/accuracy") for row in store.rows.values()] == [None, 0.25, None, 0.5]


def test_dispatcher_measures_taken_newest_first_all_arrive(folder: RunFolder) -> None:
    store = MemoryStore()
    first = Driver(folder, {"a": lambda: MemoryTracker(store)})
    first.resume(0)
    first.take(1, 2, 3, 4)
    first.end(finished=False)
    again = Driver(folder, {"a": lambda: MemoryTracker(store)})
    again.feed.measured(4, {"heldout/accuracy": 0.5})
    again.feed.measured(2, {"heldout/accuracy": 0.25})
    again.resume(4)
    again.end()
    assert store.heldout == {2: {"heldout/accuracy": 0.25}, 4: {"heldout/accuracy": 0.5}}


def test_dispatcher_tracker_added_later_gets_the_whole_run(folder: RunFolder) -> None:
    first, second = MemoryStore(), MemoryStore()
    driver = Driver(folder, {"a": lambda: MemoryTracker(first)})
    driver.resume(0)
    driver.feed.event({"event": "baseline", "at": 3.0, "metrics": {"heldout/accuracy": 0.25}})
    driver.take(1, 2)
    driver.end(finished=False)
    later = Driver(folder, {"a": lambda: MemoryTracker(first), "b": lambda: MemoryTracker(second)})
    later.resume(2)
    later.take(3)
    later.end()
    assert rewards(first) == rewards(second) == {1: 1.0, 2: 2.0, 3: 3.0}
    assert second.heldout == {0: {"heldout/accuracy": 0.25}}


def test_dispatcher_finished_run_started_again_sends_the_rest(folder: RunFolder) -> None:
    store = MemoryStore()
    driver = Driver(folder, {})
    driver.resume(0)
    driver.take(1, 2)
    driver.end()
    again = Driver(folder, {"a": lambda: MemoryTracker(store)})
    again.end()  # no step is left to take
    assert rewards(store) == {1: 1.0, 2: 2.0} and store.summary


@pytest.mark.long
def test_dispatcher_broken_and_hanging_trackers_delay_nothing(folder: RunFolder) -> None:
    stores = {name: MemoryStore() for name in ("good", "broken", "hanging")}
    classes: dict[str, type[MemoryTracker]] = {
        "good": MemoryTracker,
        "broken": BrokenTracker,
        "hanging": HangingTracker,
    }
    trackers: dict[str, Callable[[], Tracker]] = {name: partial(classes[name], store) for name, store in stores.items()}

    def is_stored(step: int) -> bool:
        return step in stores["good"].rows

    driver = Driver(folder, trackers, queue_items=10, close_seconds=0.2)
    driver.feed.observers = (driver.trackers,)  # the time of the calls below is that of the trackers alone
    driver.resume(0)
    calls = []
    for step in range(1, 1001):
        start = time.perf_counter()
        driver.feed.step({"step": step, "reward/mean": 0.5}, 100.0)
        calls.append(time.perf_counter() - start)
        if step % 5 == 0:  # a step of training takes longer than one of these
            wait_until(partial(is_stored, step))
    driver.feed.close()
    assert sorted(calls)[len(calls) // 2] < 0.001  # 1 ms; measured about 20 microseconds
    assert len(stores["good"].rows) == 1000
    assert [notice for notice in driver.notices if "broken failed" in notice] == [
        "run.trackers: broken failed: ConnectionError: no server with a second line and [hidden-secret]; training goes "
        "on, and the metrics are sent again until it works"
    ]
    assert "broken, hanging did not take all metrics within 0.2 s" in driver.notices[-1]


@pytest.mark.parametrize("queue_items", [3, 1000])
def test_dispatcher_tracker_back_after_a_failure_gets_everything(folder: RunFolder, queue_items: int) -> None:
    store = MemoryStore()
    driver = Driver(folder, {"a": lambda: BrokenTracker(store)}, queue_items=queue_items)
    driver.resume(0)
    driver.take(*range(1, 21))
    driver.feed.measured(10, {"heldout/accuracy": 0.5})
    driver.resume(15)
    driver.take(*range(16, 31), reward=0.5)
    wait_until(lambda: any("failed" in notice for notice in driver.notices))
    BrokenTracker.works.set()
    wait_until(lambda: 30 in store.rows)
    assert rewards(store) == {step: step + (0.5 if step > 15 else 0.0) for step in range(1, 31)}
    driver.end()
    assert [notice.split(":")[1] for notice in driver.notices] == [" a failed", " a works again"]
    kept = store.rows[10] if queue_items == 3 else store.heldout[10]  # read from the file, or sent when measured
    assert kept["heldout/accuracy"] == 0.5


@pytest.mark.parametrize("failures", [1, 3])
def test_dispatcher_steps_lost_by_a_failed_flush_are_sent_again(folder: RunFolder, failures: int) -> None:
    store = MemoryStore()
    driver = Driver(folder, {"a": lambda: BufferedTracker(store)})
    driver.resume(0)
    wait_until(lambda: store.flushes > 0)
    store.failures = failures
    driver.feed.event({"event": "baseline", "at": 3.0, "metrics": {"heldout/accuracy": 0.25}})
    driver.take(1, 2)
    driver.feed.step({"step": 3, "reward/mean": 3.0, "checkpoint": "checkpoint-3"}, 103.0)  # it flushes
    driver.take(4, 5)
    wait_until(lambda: store.failures == 0)
    driver.end()
    assert rewards(store) == {1: 1.0, 2: 2.0, 3: 3.0, 4: 4.0, 5: 5.0}
    assert store.times == {1: 101.0, 2: 102.0, 3: 103.0, 4: 104.0, 5: 105.0}
    assert store.heldout == {0: {"heldout/accuracy": 0.25}}
    assert [notice.split(":")[1] for notice in driver.notices] == [" a failed", " a works again"]


@pytest.mark.parametrize("finished", [True, False])
def test_dispatcher_failed_last_flush_loses_nothing(folder: RunFolder, finished: bool) -> None:
    store = MemoryStore()
    driver = Driver(folder, {"a": lambda: BufferedTracker(store)})
    driver.resume(0)
    wait_until(lambda: store.flushes > 0)
    driver.take(1, 2)
    store.failures = 1
    driver.end(finished=finished)
    assert rewards(store) == {1: 1.0, 2: 2.0} and bool(store.summary) == finished
    assert [notice.split(":")[1] for notice in driver.notices] == [" a failed", " a works again"]


def test_dispatcher_end_of_the_launch_shortens_a_pause(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatcher, "FIRST_PAUSE", 10 * WAIT_SECONDS)
    store = MemoryStore()
    driver = Driver(folder, {"a": lambda: BrokenTracker(store)}, close_seconds=WAIT_SECONDS)
    driver.resume(0)
    driver.take(1, 2)
    wait_until(lambda: any("failed" in notice for notice in driver.notices))
    BrokenTracker.works.set()
    driver.end()
    assert rewards(store) == {1: 1.0, 2: 2.0} and store.closed == [False, True]
    assert [notice.split(":")[1] for notice in driver.notices] == [" a failed", " a works again"]


def test_dispatcher_tracker_that_hung_gets_everything_at_the_end(folder: RunFolder) -> None:
    store = MemoryStore()
    driver = Driver(folder, {"a": lambda: HangingTracker(store)}, queue_items=3)
    driver.resume(0)
    driver.take(*range(1, 51))
    HangingTracker.released.set()
    driver.end()
    assert sorted(store.rows) == list(range(1, 51)) and store.closed == [True] and driver.notices == []


def test_dispatcher_closing_error_is_a_notice(folder: RunFolder) -> None:
    class Unclosable(MemoryTracker):
        def close(self, *, is_complete: bool) -> None:
            raise RuntimeError("no")

    driver = Driver(folder, {"a": lambda: Unclosable(MemoryStore())})
    driver.end()
    assert driver.notices == ["run.trackers: a could not be closed: RuntimeError: no"]


def test_dispatcher_without_progress_writes_nothing(folder: RunFolder) -> None:
    driver = Driver(folder, {})
    driver.trackers.close()
    assert not folder.exists("trackers.json")


def test_tracker_file_damaged_begins_a_new_run(folder: RunFolder) -> None:
    first = TrackerFile(folder, "run")
    run_id = first.run_id()
    assert run_id.startswith("run-") and TrackerFile(folder, "run").run_id() == run_id
    first.save("a", Position(3, 2))
    assert TrackerFile(folder, "run").position("a") == Position(3, 2)
    folder.write_text('{"id": ["', "trackers.json")
    assert TrackerFile(folder, "run").run_id() != run_id
    folder.write_json({"id": "run-1", "positions": {"a": {"step": "x"}, "b": 3}}, "trackers.json")
    assert TrackerFile(folder, "run").position("a") == TrackerFile(folder, "run").position("b") == Position()


def test_event_list_bounds_and_escapes_its_lines(folder: RunFolder) -> None:
    events = EventList(folder)
    assert not events.add({"event": "step", "at": 1.0, "step": 1})
    assert events.add({"event": "notice", "at": 0.0, "what": "a\u202eb " + "x" * 5000 + "\n\nend"})
    (line,) = events.lines()
    assert len(line) < 400 and "\n" not in line and "⟨U+202E⟩" in line
    for number in range(500):
        events.add({"event": "health", "at": float(number), "what": f"warning {number}"})
    assert len(events.lines()) == 100 and events.lines()[-1].endswith("health: warning 499")
    assert replace(Position(), step=1) == Position(1, -1)
