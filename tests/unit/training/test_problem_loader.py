"""Marks of a loader in the ledger, and the background fetch of an epoch's first row."""

import threading
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.data.ledger import DatasetFingerprint, Ledger, ids_to_uint64, uint64_to_ids
from grpo_ray.data.mixture_ledger import MixtureLedger
from grpo_ray.data.problem import Problem
from grpo_ray.data.stream import to_row
from grpo_ray.errors import DataError
from grpo_ray.storage.parquet import MemoryBudget
from grpo_ray.storage.records import rollout_files
from grpo_ray.storage.records.groups import GroupRecord
from grpo_ray.storage.records.rollout_files import read_rollouts, read_steps, write_rollouts
from grpo_ray.storage.records.tokens import LossTokens, TokenRecord
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.training.problem_loader import ProblemLoader, prefetch_first


def group(problem: str, epoch: int) -> GroupRecord:
    return GroupRecord(
        step=3, epoch=epoch, problem=problem, rewards=(1.0,), correct=(1.0,), lengths=(5,), truncated=(False,)
    )


def test_problem_loader_settle_marks_problems_of_every_epoch(tmp_path: Path) -> None:
    """A step at the end of an epoch holds problems of two."""
    folder = RunFolder(str(tmp_path), "run")
    loader = ProblemLoader(
        load_config(None, []),
        MixtureLedger.single(Ledger()),
        folder,
        publish_plan=lambda plan: None,
        rows=lambda: iter([]),
    )
    ends, begins = "a" * 16, "b" * 16
    loader.record([group(ends, epoch=0), group(begins, epoch=1)])
    loader.settle(tmp_path)
    saved = Ledger.load(tmp_path)
    assert [uint64_to_ids(saved.used(epoch)) for epoch in range(3)] == [[ends], [begins], []]


def test_problem_loader_settle_records_drawn_problems_as_open(tmp_path: Path) -> None:
    """Those of the step are used, and those that were drawn for later steps are open."""
    ids = [f"{number:016x}" for number in range(5)]
    rows = [to_row(Problem(id=each, prompt=[{"role": "user", "content": "?"}], solution="1"), epoch=0) for each in ids]
    settings = ("rollout.max_staleness=2", "grpo.prompts_per_step=1")
    loader, _ = make_loader(RunFolder(str(tmp_path), "run"), ledger_of(ids), *settings, rows=rows)
    problems = loader.problems()
    drawn = [next(problems)[0].id for _ in range(3)]
    loader.record([group(drawn[0], epoch=0)])
    loader.settle(tmp_path)
    saved = Ledger.load(tmp_path)
    assert (uint64_to_ids(saved.used(0)), uint64_to_ids(saved.open(0))) == (drawn[:1], drawn[1:])


def test_problem_loader_settle_keeps_open_problems_of_an_attempt_with_more_staleness(tmp_path: Path) -> None:
    """Otherwise their epoch, which begins later, would get another curriculum than the one they were drawn by."""
    ids = [f"{number:016x}" for number in range(3)]
    ledger = ledger_of(ids)
    ledger.set_open({0: ids[:1], 1: ids[1:2]})
    loader, _ = make_loader(RunFolder(str(tmp_path), "run"), ledger, "grpo.prompts_per_step=1")
    loader.record([group(ids[0], epoch=0)])
    loader.settle(tmp_path)
    saved = Ledger.load(tmp_path)
    assert [uint64_to_ids(saved.open(epoch)) for epoch in (0, 1)] == [[], ids[1:2]]


def test_problem_loader_curriculum_of_open_problems_is_kept(tmp_path: Path) -> None:
    solved, first, second = (f"{number:016x}" for number in (1, 2, 3))
    folder = RunFolder(str(tmp_path), "run")
    write_rollouts(folder, [replace(group(solved, epoch=0), step=1)])
    for opened, skipped in (((), [solved]), ((first,), [])):
        ledger = ledger_of([solved, first, second], closed_epochs=1)
        ledger.set_open({1: opened})
        loader, _ = make_loader(folder, ledger, "data.skip_solved=1", "grpo.prompts_per_step=1")
        loader.problems()
        assert uint64_to_ids(ledger.skipped(1)) == skipped  # by the groups so far, or as it was when they were drawn


def ledger_of(ids: Sequence[str], used: Sequence[str] = (), closed_epochs: int = 0) -> Ledger:
    """Return the ledger of a dataset, with used problems of the first open epoch."""
    ledger = Ledger(closed_epochs=closed_epochs)
    ledger.set_dataset(np.sort(ids_to_uint64(ids)), DatasetFingerprint.of(ids))
    ledger.mark(closed_epochs, used)
    return ledger


def make_loader(
    folder: RunFolder, ledger: Ledger, *overrides: str, rows: Sequence[dict[str, Any]] = (), start_step: int = 1
) -> Any:
    """Return a loader of one worker, and the plans that it publishes."""
    plans: list[Any] = []
    config = load_config(None, ["cluster.num_workers=1", "grpo.prompts_per_step=2", *overrides])
    return ProblemLoader(
        config, MixtureLedger.single(ledger), folder, plans.append, rows=lambda: iter(rows), start_step=start_step
    ), plans


def test_problem_loader_skips_only_problems_that_the_dataset_still_has(tmp_path: Path) -> None:
    folder, solved = RunFolder(str(tmp_path), "run"), ["1" * 16, "2" * 16]
    write_rollouts(folder, [group(each, epoch=0) for each in solved])  # at step 3, in epoch 0
    ids = ["2" * 16, "3" * 16, "4" * 16]  # the first one was removed
    ledger = ledger_of(ids, closed_epochs=1)
    loader, plans = make_loader(folder, ledger, "data.skip_solved=1", start_step=3)
    loader.problems()
    assert uint64_to_ids(ledger.skipped(1)) == uint64_to_ids(plans[0].excluded) == ["2" * 16]
    assert ledger.remaining(1) == 2


def test_problem_loader_curriculum_again_is_the_same(tmp_path: Path) -> None:
    """An attempt that ended before the epoch's first step has recorded its curriculum in the checkpoint."""
    folder, solved = RunFolder(str(tmp_path), "run"), ["1" * 16, "2" * 16]
    write_rollouts(folder, [group(each, epoch=0) for each in solved])
    ledger = ledger_of([*solved, "3" * 16, "4" * 16], closed_epochs=1)
    for _ in range(2):  # 4 problems, 2 of them skipped: one step of 2
        loader, _ = make_loader(folder, ledger, "data.skip_solved=1", start_step=3)
        loader.problems()
        assert uint64_to_ids(ledger.skipped(1)) == solved


def test_problem_loader_curriculum_needs_no_groups_of_written_files(tmp_path: Path) -> None:
    """Groups leave memory once their file is written; before, they count from memory."""
    folder, (solved, other) = RunFolder(str(tmp_path), "run"), ("1" * 16, "2" * 16)
    for is_written in (False, True):
        ledger = ledger_of([solved, other, "3" * 16, "4" * 16])
        loader, _ = make_loader(folder, ledger, "data.skip_solved=1", start_step=0)
        loader.record([group(solved, epoch=0), group(other, epoch=0)])
        write = loader.settle(tmp_path)
        assert len(loader._not_in_files) == 2
        if is_written:
            write()
            assert loader._not_in_files == []
        loader._apply_curriculum(ledger, 1, least=2)
        assert uint64_to_ids(ledger.skipped(1)) == [solved, other]


class SmallBudget(MemoryBudget):
    """Budget that no file fits into, unless it has no limit."""

    def __init__(self, limit: int | None = 1):
        super().__init__(None if limit is None else 1)


def test_problem_loader_curriculum_has_no_limit_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout_files, "MemoryBudget", SmallBudget)
    folder, solved = RunFolder(str(tmp_path), "run"), ["1" * 16, "2" * 16]
    write_rollouts(folder, [group(each, epoch=0) for each in solved])
    with pytest.raises(DataError, match="more than 1 bytes in memory"):  # a stranger's
        read_rollouts(folder)
    ledger = ledger_of([*solved, "3" * 16, "4" * 16], closed_epochs=1)
    loader, _ = make_loader(folder, ledger, "data.skip_solved=1", start_step=3)
    loader.problems()
    assert uint64_to_ids(ledger.skipped(1)) == solved


def test_problem_loader_writes_tokens_that_come_after_a_gathering(tmp_path: Path) -> None:
    """An epoch that begins while a step is being taken gathers the step's groups before its losses are computed."""
    folder = RunFolder(str(tmp_path), "run")
    loader, _ = make_loader(folder, ledger_of(["1" * 16, "2" * 16, "3" * 16]), start_step=0)
    tokens = TokenRecord(text=b"4", ends=array("i", [1]), head=1, engine_logps=array("f", [-1.0]), masked=b"\0")
    sample = replace(group("1" * 16, 0), completions=("4",), sample="first", advantages=(0.5,), tokens=(tokens,))
    loader.record([sample])
    loader._begin_plan([])
    loader.record_tokens([LossTokens(3, "first", 0, array("f", [-1.25]), b"\1")])
    loader.settle(tmp_path)()
    (row,) = read_steps(folder, with_tokens=True).to_pylist()
    (written,) = row["tokens"]
    assert (written["texts"], written["learner_logps"], written["masked"]) == (["4"], [-1.25], [True])
    assert loader._unwritten == loader._unwritten_tokens == []


def test_problem_loader_problem_of_changed_file_is_refused(tmp_path: Path) -> None:
    known, unknown = "1" * 16, "2" * 16
    rows = [to_row(Problem(id=each, prompt=[], solution="1"), epoch=0) for each in (known, unknown)]
    loader, _ = make_loader(RunFolder(str(tmp_path), "run"), ledger_of([known, "3" * 16]), rows=rows)
    problems = loader.problems()
    assert next(problems)[0].id == known
    with pytest.raises(DataError, match=f"has changed since the run was launched: it now has the problem {unknown}"):
        next(problems)


def test_prefetch_first_starts_before_the_first_row_is_requested() -> None:
    begun = threading.Event()

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(3):
            begun.set()
            yield {"number": number}

    fetched = prefetch_first(rows())
    assert begun.wait(timeout=60)
    assert [row["number"] for row in fetched] == [0, 1, 2]


def test_prefetch_first_empty_iterator_ends_at_once() -> None:
    assert list(prefetch_first(iter([]))) == []


def test_prefetch_first_error_is_raised_to_the_consumer() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        raise OSError("the file is gone")
        yield {}

    with pytest.raises(OSError, match="the file is gone"):
        next(prefetch_first(rows()))
