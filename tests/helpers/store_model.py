"""Model of a storage under concurrency, lost replies and crashes, small enough to be explored exhaustively.

`explore` runs a scenario once for every sequence of decisions: which worker goes next, whether a call fails, and
whether it is carried out although its reply is lost. Every state that the storage passes through is one in which all
workers may have been killed.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from grpo_ray.storage.run_folder import RunFolder

State = Mapping[str, str]
"""Path below the run folder -> content of the file."""


class Decisions:
    """One sequence of decisions; the next sequence in depth-first order is derived from it."""

    def __init__(self, prefix: list[int], seen: set[Any]):
        self.prefix, self.seen = prefix, seen
        self.taken: list[int] = []
        self.options: list[int] = []
        self.is_known = False
        """True once the future of this sequence is that of an earlier one."""

    def choose(self, options: int) -> int:
        """Return a number below `options`: the planned one, or 0 after the end of the plan."""
        position = len(self.taken)
        self.taken.append(self.prefix[position] if position < len(self.prefix) else 0)
        self.options.append(1 if self.is_known else options)
        return self.taken[-1]

    def arrive(self, situation: Any) -> None:
        """Stop branching if an earlier sequence led to the same situation: all of its futures are explored from there.

        situation: hashable value that determines everything that can follow.
        """
        if len(self.taken) >= len(self.prefix):
            self.is_known |= situation in self.seen
            self.seen.add(situation)

    def next_prefix(self) -> list[int] | None:
        """Return the plan of the next sequence; None after the last one."""
        for position in reversed(range(len(self.taken))):
            if self.taken[position] + 1 < self.options[position]:
                return [*self.taken[:position], self.taken[position] + 1]
        return None


def explore(scenario: Callable[[Decisions], None]) -> int:
    """Run a scenario once for every sequence of decisions; return the number of runs."""
    prefix: list[int] | None = []
    runs = 0
    seen: set[Any] = set()
    while prefix is not None:
        decisions = Decisions(prefix, seen)
        scenario(decisions)
        runs += 1
        prefix = decisions.next_prefix()
    return runs


class Crash(BaseException):
    """Death of the process at a call; no code under test catches it."""


class StoreModel(RunFolder):
    """Run folder in memory. Each change of one file is atomic; a folder is deleted file by file, in any order.

    Args:
        is_remote: model an object store: folders cannot be renamed.
        decisions: decides about faults and about the order in which files of a folder are deleted.
        faults: number of calls that may fail or lose their reply.
    """

    def __init__(self, state: State, is_remote: bool, decisions: Decisions, faults: int = 0):
        self.state, self.is_remote, self.decisions, self.faults = dict(state), is_remote, decisions, faults
        self.retry_seconds = 1e9
        self.passed_through: list[State] = []
        self.crash_after: int | None = None
        """Number of changes after which the process dies; None: never."""
        self.wait_for_turn: Callable[[], None] = lambda: None
        self.record: Callable[[Any], None] = lambda reply: None
        """Receives the reply of every call that a worker waits its turn for."""

    @property
    def local(self) -> Path | None:
        return None if self.is_remote else Path("model")

    def _change(self, change: Callable[[], Any]) -> None:
        if self.crash_after is not None and len(self.passed_through) >= self.crash_after:
            raise Crash
        self.wait_for_turn()
        outcome = self.decisions.choose(3) if self.faults else 0
        self.faults -= outcome > 0
        self.record(outcome)
        if outcome != 1:
            change()
            self.passed_through.append(dict(self.state))
        if outcome:
            raise ConnectionError("no reply" if outcome == 2 else "not carried out")

    def exists(self, *names: str) -> bool:
        self.wait_for_turn()
        path = "/".join(names)
        found = any(file == path or file.startswith(f"{path}/") for file in self.state)
        self.record(found)
        return found

    def list_folders(self, prefix: str = "") -> list[str]:
        folders = {file.partition("/")[0] for file in self.state if "/" in file}
        return sorted(name for name in folders if name.startswith(prefix))

    def read_text(self, *names: str, limit: int = 0) -> str:
        return self.state["/".join(names)]

    def write_text(self, text: str, *names: str) -> None:
        self._change(lambda: self.state.update({"/".join(names): text}))

    def delete_file(self, name: str, *names: str) -> None:
        path = "/".join((name, *names))
        if path in self.state:
            self._change(lambda: self.state.pop(path))

    def delete_folder(self, name: str, *names: str) -> None:
        path = "/".join((name, *names))
        while files := sorted(file for file in self.state if file.startswith(f"{path}/")):
            self.delete_file(files[self.decisions.choose(len(files))])

    def rename_folder(self, old: str, new: str) -> None:
        def rename() -> None:
            files = {file: text for file, text in self.state.items() if file.startswith(f"{old}/")}
            if not files:
                raise FileNotFoundError(old)
            for file, text in files.items():
                del self.state[file]
                self.state[new + file.removeprefix(old)] = text

        self._change(rename)


class Scheduler:
    """Runs workers of which one at a time goes on, from one call to the store to the next."""

    def __init__(self, store: StoreModel, workers: list[Callable[[], None]]):
        self.store = store
        self.turns = [threading.Semaphore(0) for _ in workers]
        self.paused = threading.Semaphore(0)
        self.ended = [False] * len(workers)
        self.blocked_at: list[State | None] = [None] * len(workers)
        self.current = 0
        self.replies: list[tuple[Any, ...]] = [() for _ in workers]
        """Replies that each worker has received: they determine where it is."""
        self.errors: list[BaseException] = []
        self.threads = [threading.Thread(target=self._run, args=each, daemon=True) for each in enumerate(workers)]

    def _run(self, number: int, worker: Callable[[], None]) -> None:
        self.turns[number].acquire()
        try:
            worker()
        except BaseException as error:  # a crash that is planted ends the thread with any error
            self.errors.append(error)
        self.ended[number] = True
        self.paused.release()

    def pause(self, blocked: bool = False) -> None:
        """Give the turn back, from inside a worker; a blocked one gets it again once the store has changed."""
        number = self.current
        self._record("blocked" if blocked else "turn")
        self.blocked_at[number] = dict(self.store.state) if blocked else None
        self.paused.release()
        self.turns[number].acquire()

    def _record(self, reply: Any) -> None:
        self.replies[self.current] += (reply,)

    def run(self, decisions: Decisions) -> None:
        """Run all workers to their end."""
        self.store.wait_for_turn, self.store.record = self.pause, self._record
        for thread in self.threads:
            thread.start()
        while ready := list(self._ready()):
            decisions.arrive((frozenset(self.store.state.items()), *self.replies, self.store.faults))
            self.current = ready[decisions.choose(len(ready))]
            self.turns[self.current].release()
            self.paused.acquire()
        self.store.wait_for_turn, self.store.record = lambda: None, lambda reply: None
        if self.errors:
            raise self.errors[0]
        assert all(self.ended), "the workers wait for each other"

    def _ready(self) -> Iterator[int]:
        for number, ended in enumerate(self.ended):
            if not ended and self.blocked_at[number] != self.store.state:
                yield number
