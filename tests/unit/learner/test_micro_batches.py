"""Selection of the rows that carry gradient, their assignment to workers, and their packing into micro-batches."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_batches import ROWS, batch_of

from grpo_ray.config.trl_fields import LOSS_TYPES
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.exact_savings import SavingsPlan
from grpo_ray.learner.micro_batches import (
    ENOUGH_TOKENS,
    MEAN_OVER_ROWS,
    LossScale,
    RowAssignment,
    RowFacts,
    _exchange_rows,
    assign_rows,
    balance_rows,
    choose_rows,
    plan_micro_batches,
    scale_metrics,
)
from grpo_ray.learner.passes import count_positions
from grpo_ray.resilience.nonfinite import NonFiniteMonitor

quick = settings(max_examples=60, deadline=None, derandomize=True)


def losses(batch: dict[str, Any], loss_type: str, all_tokens: int) -> float:
    """Return a loss with the denominator of the loss type, of a value that differs from token to token."""
    values = batch["advantages"][:, None] * batch["completion_ids"].double().sqrt() * batch["completion_mask"]
    if loss_type in MEAN_OVER_ROWS:
        return values.sum().item() / len(values) if len(values) else 0.0
    return values.sum().item() / (max(batch["completion_mask"].sum().item(), 1) if loss_type == "bnpo" else all_tokens)


# choose_rows


def test_choose_rows_fills_up_with_cheapest_that_prove_sync() -> None:
    lengths = [5, 40, 3, 90, 33, 12]
    needed = [True, False, False, False, False, False]
    assert ENOUGH_TOKENS == 32
    assert choose_rows(needed, lengths, 2) == [0, 4]  # 33 tokens are enough, and fewer than 40
    assert choose_rows(needed, lengths, 5) == [0, 1, 3, 4, 5]  # then the longest of those that are too short
    assert choose_rows([True] * 6, lengths, 6) == list(range(6))


def test_choose_rows_of_exactly_enough_tokens_are_the_cheapest() -> None:
    # 32 tokens are enough; of equal rows, the first.
    assert choose_rows([False] * 4, [31, 40, 32, 32], 1) == [2]
    assert choose_rows([False] * 4, [31, 40, 32, 32], 3) == [1, 2, 3]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99)), min_size=1, max_size=8), st.integers(0, 8))
@quick
def test_choose_rows_keeps_needed_and_order(rows: list[tuple[bool, int]], more: int) -> None:
    needed, lengths = map(list, zip(*rows, strict=True))
    count = min(sum(needed) + more, len(rows))
    chosen = choose_rows(needed, lengths, count)
    assert len(chosen) == count and chosen == sorted(set(chosen))
    assert {row for row, need in enumerate(needed) if need} <= set(chosen)


# balance_rows and assign_rows


def test_balance_rows_worked_example() -> None:
    length = {(0, 0): 9, (0, 1): 8, (0, 2): 7, (0, 3): 2, (0, 4): 2, (1, 3): 1}
    assert balance_rows(list(length), length.__getitem__, 2) == [[(0, 0), (0, 3), (0, 4)], [(0, 1), (0, 2), (1, 3)]]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 4), st.data())
@quick
def test_balance_rows_each_row_once_and_as_many_for_each(rows: list[int], workers: int, data: st.DataObject) -> None:
    length = {(0, at): tokens for at, tokens in enumerate(rows * workers)}
    assigned = balance_rows(data.draw(st.permutations(list(length))), length.__getitem__, workers)
    assert [len(each) for each in assigned] == [len(rows)] * workers
    assert sorted(index for each in assigned for index in each) == sorted(length)
    assert assigned == balance_rows(list(length), length.__getitem__, workers)  # in whichever order they come
    totals = [sum(length[index] for index in each) for each in assigned]
    assert max(totals) - min(totals) <= max(rows)


def facts(needed: Sequence[int], lengths: Sequence[int]) -> RowFacts:
    return RowFacts([bool(need) for need in needed], list(lengths), list(lengths))


def test_assign_rows_even_workers_keep_their_own() -> None:
    assignment = assign_rows([facts([1, 0, 1], [9, 5, 9]), facts([1, 0, 0], [18, 5, 6])], share=True)
    # Both have 18 tokens to read. The second worker gets another of its rows, so that it has as many.
    assert not assignment.is_shared
    assert assignment.rows == [[(0, 0), (0, 2)], [(1, 0), (1, 2)]]


def test_assign_rows_uneven_workers_share() -> None:
    uneven = [facts([1, 1, 1], [9, 8, 7]), facts([0, 0, 0], [2, 2, 1])]
    assignment = assign_rows(uneven, share=True)
    # Three rows are needed, and one proves the second worker's engine: two for each.
    assert assignment.is_shared
    assert assignment.rows == [[(0, 0), (1, 0)], [(0, 1), (0, 2)]]
    alone = assign_rows(uneven, share=False)
    assert not alone.is_shared and [len(rows) for rows in alone.rows] == [3, 3]


def test_assign_rows_share_only_beyond_the_tolerance() -> None:
    def is_shared(*tokens: int) -> bool:
        return assign_rows([facts([1], [each]) for each in tokens], share=True).is_shared

    assert not is_shared(22, 18)  # exactly 1.1 times the mean of 20
    assert is_shared(24, 19)  # more than 1.1 times the mean of 21.5, which is 23.65
    assert not is_shared(0, 0)


def test_loss_scale_without_changes_is_one() -> None:
    assert LossScale() == LossScale(loss_factor=1.0, row_weight=1.0, token_weight=1.0, is_complete=True)


def test_scale_metrics_complete_batch_keeps_the_least_clip_ratio() -> None:
    metrics = {"clip_ratio/low_min": [0.2]}
    scale_metrics(metrics, LossScale(), "token")  # type: ignore[arg-type]
    assert metrics == {"clip_ratio/low_min": [0.2]}
    nothing: dict[str, list[float]] = {}
    scale_metrics(nothing, LossScale(is_complete=False), "token")  # type: ignore[arg-type]
    assert nothing == {}


def test_scale_metrics_worked_example() -> None:
    metrics = {"clip_ratio/low_mean": [0.5, 0.5], "clip_ratio/low_min": [0.2, 0.2, 0.2], "loss": [1.0]}
    scale = LossScale(row_weight=0.25, token_weight=0.5, is_complete=False)
    scale_metrics(metrics, scale, "token")  # type: ignore[arg-type]
    assert metrics == {"clip_ratio/low_mean": [0.5, 0.25], "clip_ratio/low_min": [0.2, 0.2, 0.0], "loss": [1.0]}
    scale_metrics(metrics, scale, "sequence")  # type: ignore[arg-type]
    assert metrics["clip_ratio/low_mean"] == [0.5, 0.0625]


# plan_micro_batches


@given(
    rows=st.lists(ROWS, min_size=1, max_size=3),
    loss_type=st.sampled_from(LOSS_TYPES),
    regroup=st.booleans(),
    pack=st.booleans(),
    tokens=st.none() | st.integers(4 * 9, 8 * 9),
)
@quick
def test_plan_micro_batches_loss_over_rows_left_is_loss_over_all(
    rows: Any, loss_type: str, regroup: bool, pack: bool, tokens: int | None
) -> None:
    """The sum over micro-batches of the loss, with each loss type's denominator, stays the same.

    A micro-batch has four rows of at most 9 tokens.
    """
    made = [batch_of(each, prompts=5, completions=6) for each in rows]
    all_tokens = max(sum(each["completion_mask"].sum().item() for each in made), 1)
    regroups = regroup and loss_type != "bnpo"
    savings = SavingsPlan(
        rows=True, regroup=regroups, share=regroups, trim_prompts=True, trim_completions=True, shift=True, pack=pack
    )  # fmt: skip
    arranged, metrics = plan_micro_batches(made, savings, loss_type, Workers(), tokens)
    expected = sum(losses(each, loss_type, all_tokens) for each in made)
    actual = sum(losses(batch, loss_type, all_tokens) * part.loss_factor for batch, part in arranged)
    assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)
    left = [batch for batch, _ in arranged]
    rows_left, rows_all = (sum(len(each["advantages"]) for each in some) for some in (left, made))
    assert rows_left >= 1  # one row at least proves the engine
    assert metrics["learner/completions_share"] == pytest.approx(rows_left / rows_all)
    tokens_left, tokens_all = (sum(each["completion_mask"].sum().item() for each in some) for some in (left, made))
    assert metrics["learner/tokens_saved"] == tokens_all - tokens_left
    if regroups and tokens is not None:
        lengths = [(each["prompt_mask"].sum(dim=1) + each["completion_mask"].sum(dim=1)).tolist() for each in left]
        assert all(count_positions(each, savings.layout) <= tokens for each in lengths)


def test_plan_micro_batches_mean_over_passes_left_is_mean_over_all_rows() -> None:
    made = [
        {
            "prompt_ids": torch.ones(4, 2), "prompt_mask": torch.ones(4, 2), "completion_ids": torch.ones(4, 3),
            "completion_mask": torch.ones(4, 3), "advantages": torch.tensor([1.0, 0.0, 0.0, signal]),
        }
        for signal in (0.0, 0.0, 1.0, 1.0)
    ]  # fmt: skip
    savings = SavingsPlan(rows=True, regroup=True)
    arranged, metrics = plan_micro_batches(made, savings, "grpo", Workers())
    assert [len(batch["advantages"]) for batch, _ in arranged] == [0, 0, 3, 3]
    assert metrics["learner/completions_share"] == metrics["learner/positions_share"] == 6 / 16
    for weight in ("row_weight", "token_weight"):  # TRL takes a mean over the two passes
        assert sum(getattr(part, weight) for _, part in arranged[2:]) / 2 == 6 / 16
    assert [part.loss_factor for _, part in arranged] == [0, 0, 3 / 4, 3 / 4]


def test_plan_micro_batches_in_place_worked_example() -> None:
    # Prompts of 1 and completions of 2 tokens, in 2 + 3 columns; of 4 rows in 2 micro-batches, 2 carry gradient.
    made = [batch_of([(1, 2, advantage) for advantage in each], extra=1) for each in ((1.0, 0.0), (1.0, 0.0))]
    cut = SavingsPlan(rows=True, trim_prompts=True, trim_completions=True, shift=True)
    arranged, metrics = plan_micro_batches(made, cut, "grpo", Workers())
    assert [part for _, part in arranged] == [LossScale(0.5, 0.5, 0.5, False)] * 2
    assert [batch["completion_ids"].shape for batch, _ in arranged] == [(1, 2)] * 2
    assert metrics == {
        "learner/completions_share": 0.5,
        "learner/positions_share": pytest.approx(6 / 20),  # 3 positions of each row left, of 5 of each row
        "learner/tokens_saved": 4.0,
    }
    ((first, whole), _), _ = plan_micro_batches(made, SavingsPlan(), "grpo", Workers())
    assert whole == LossScale() and first["advantages"] is made[0]["advantages"]  # nothing is copied


def test_plan_micro_batches_without_gradient_keeps_one_row_to_prove_the_engine() -> None:
    made = [batch_of([(1, 2, 0.0), (1, 3, 0.0)]), batch_of([(1, 1, 0.0), (1, 4, 0.0)])]
    for savings in (SavingsPlan(rows=True), SavingsPlan(rows=True, regroup=True)):
        arranged, _ = plan_micro_batches(made, savings, "bnpo", Workers())
        rows = [len(batch["advantages"]) for batch, _ in arranged]
        assert rows == ([0, 1] if savings.regroup else [1, 1])


@pytest.mark.parametrize("regroup", [False, True])
def test_step_without_signal_moves_weights_by_momentum(regroup: bool) -> None:
    weight = torch.nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    monitor = NonFiniteMonitor(0, list, lambda groups, step: "")

    def take_step(*advantages: float) -> list[float]:
        """Take a step on completions of 2 tokens each, with the loss of one policy weight; return the gradient."""
        optimizer.zero_grad()
        made = [batch_of([(1, 2, advantage) for advantage in advantages])]
        for batch, scale in plan_micro_batches(made, SavingsPlan(rows=True, regroup=regroup), "dapo", Workers())[0]:
            logps = weight * batch["completion_mask"]
            ratio = (logps - logps.detach()).exp()
            loss = -(batch["advantages"][:, None] * ratio * batch["completion_mask"]).sum() * scale.loss_factor
            loss.backward()
            monitor.observe_loss(loss)
        args, state = SimpleNamespace(device=torch.device("cpu")), SimpleNamespace(global_step=0)
        monitor.on_pre_optimizer_step(args, state, None, optimizer=optimizer)
        assert weight.grad is not None  # the optimizer would leave the weight as it is
        optimizer.step()
        return list(weight.grad.tolist())

    assert take_step(0.5, 0.0) == [-1.0]  # -0.5 for each of the 2 tokens
    assert weight.item() == pytest.approx(1.1)  # Adam's first step has the size of the learning rate
    assert take_step(0.0, 0.0) == [0.0]
    # Momentum 0.9 * 0.1 / (1 - 0.9^2) = 0.4737, mean square 0.999 * 0.001 / (1 - 0.999^2) = 0.4997 = 0.7069^2
    assert weight.item() == pytest.approx(1.1 + 0.1 * 0.4737 / 0.7069, abs=1e-4)
    assert monitor.skipped == 0


def test_plan_micro_batches_rows_that_move_keep_all_values() -> None:
    """Two workers, in two threads of this process."""
    pools = [
        {
            "prompt_ids": torch.tensor([[0, 5 + rank], [3, 4]]), "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
            "completion_ids": torch.tensor([[7, 7, 7], [8, 0, 0]]) + rank,
            "completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
            "importance_sampling_ratio": torch.tensor([[0.5, 2.0, 1.0], [4.0, 1.0, 1.0]]),
            "advantages": torch.tensor([1.0, 2.0]) * (1 - rank), "num_items_in_batch": torch.tensor(4),
        }
        for rank in (0, 1)
    ]  # fmt: skip
    all_given: list[Any] = [None, None]
    both_gave = threading.Barrier(2)

    def worker(rank: int) -> Workers:
        # The first worker has 6 positions to process; the second has 4, to prove its engine.
        def table(own: torch.Tensor) -> torch.Tensor:
            if len(own) != 6:
                return own[None]  # totals of the rows that were kept
            both = [[1, 1, 4, 3, 3, 1], [0, 0, 4, 3, 3, 1]]
            assert own.tolist() == both[rank]
            return torch.tensor(both, dtype=torch.float)

        def gather_objects(given: Any) -> list[Any]:
            all_given[rank] = given
            both_gave.wait(60)
            return all_given

        return Workers(rank, count=2, gather=table, gather_objects=gather_objects)

    savings = SavingsPlan(rows=True, regroup=True, share=True)
    with ThreadPoolExecutor(2) as threads:
        made = threads.map(lambda rank: plan_micro_batches([pools[rank]], savings, "grpo", worker(rank))[0][0], (0, 1))
    (first, _), (second, part) = made
    # Three rows are needed, and a fourth gives both workers two: the longest with the shortest, and the two between.
    assert first["advantages"].tolist() == [1.0, 0.0] and first["completion_ids"].tolist() == [[7, 7, 7], [9, 0, 0]]
    assert second["advantages"].tolist() == [0.0, 2.0] and part.loss_factor == 1.0
    assert second["completion_ids"].tolist() == [[8, 8, 8], [8, 0, 0]]
    # A row that has moved is padded again, with ratios whose logarithm is 0.
    assert first["importance_sampling_ratio"].tolist() == [[0.5, 2.0, 1.0], [4.0, 1.0, 1.0]]
    assert second["prompt_ids"].tolist() == [[0, 6], [3, 4]] and second["num_items_in_batch"].item() == 4


def test_exchange_rows_gives_the_rows_that_others_read() -> None:
    own, theirs = (
        {
            "prompt_ids": torch.ones(len(values), 1),
            "prompt_mask": torch.ones(len(values), 1),
            "completion_ids": torch.ones(len(values), 1),
            "completion_mask": torch.ones(len(values), 1),
            "advantages": torch.tensor(values),
        }
        for values in ([1.0, 2.0, 3.0], [9.0])
    )
    given: list[Any] = []

    def gather_objects(rows: Any) -> list[Any]:
        given.extend(rows)
        return [rows, {(1, 0): theirs}]

    assignment = RowAssignment([[(0, 2), (1, 0)], [(0, 0)]], is_shared=True)
    rows = _exchange_rows(own, assignment, Workers(0, count=2, gather_objects=gather_objects))
    assert given == [(0, 0)]
    assert [row["advantages"].tolist() for row in rows] == [[3.0], [9.0]]
