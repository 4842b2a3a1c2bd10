"""Selection of the rows that carry gradient, and their packing into micro-batches."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.training import micro_batches
from grpo_ray.training.micro_batches import (
    ENOUGH_TOKENS,
    PER_ROW,
    SavingsPlan,
    Workers,
    balance_rows,
    choose_rows,
    has_gradient,
    is_text,
    loss_mask,
    number_of_passes,
    pack_rows,
    plan_micro_batches,
    shift_rows,
    split_by_length,
    stack_batches,
    trim_padding,
)
from grpo_ray.training.trl_config import LOSS_TYPES

quick = settings(max_examples=60, deadline=None, derandomize=True)

ROWS = st.lists(
    st.tuples(st.integers(1, 4), st.integers(0, 5), st.sampled_from([0.0, 0.0, 1.0, -0.5])), min_size=4, max_size=4
)
"""Rows of a micro-batch: tokens of the prompt, tokens of the completion that count, advantage."""


def batch_of(
    rows: Sequence[tuple[int, int, float]], extra: int = 1, prompts: int | None = None, completions: int | None = None
) -> dict[str, Any]:
    """Make a micro-batch of the given widths, or with `extra` columns more than its longest rows need."""
    prompts = prompts or max(p for p, _, _ in rows) + extra
    completions = completions or max(c for _, c, _ in rows) + extra
    prompt_mask = torch.tensor([[0] * (prompts - p) + [1] * p for p, _, _ in rows])
    completion_mask = torch.tensor([[1] * c + [0] * (completions - c) for _, c, _ in rows])
    return {
        "prompt_ids": prompt_mask * (torch.arange(prompt_mask.numel()).view_as(prompt_mask) + 3),
        "prompt_mask": prompt_mask,
        "completion_ids": completion_mask * (torch.arange(completion_mask.numel()).view_as(completion_mask) + 100),
        "completion_mask": completion_mask,
        "advantages": torch.tensor([a for _, _, a in rows], dtype=torch.float64),
    }


def losses(batch: dict[str, Any], loss_type: str, all_tokens: int) -> float:
    """Return a loss with the denominator of the loss type, of a value that differs from token to token."""
    values = batch["advantages"][:, None] * batch["completion_ids"].double().sqrt() * batch["completion_mask"]
    if loss_type in PER_ROW:
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


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 99)), min_size=1, max_size=8), st.integers(0, 8))
@quick
def test_choose_rows_keeps_needed_and_order(rows: list[tuple[bool, int]], more: int) -> None:
    needed, lengths = map(list, zip(*rows, strict=True))
    count = min(sum(needed) + more, len(rows))
    chosen = choose_rows(needed, lengths, count)
    assert len(chosen) == count and chosen == sorted(set(chosen))
    assert {row for row, need in enumerate(needed) if need} <= set(chosen)


# by_length, number_of_passes and deal


def test_by_length_worked_example() -> None:
    assert split_by_length([3, 9, 4, 9, 1], [0, 1, 2, 3, 4], 2) == [[1, 3, 2], [0, 4]]
    assert split_by_length([3, 9, 4, 9, 1], [4, 0], 2) == [[0], [4]]


@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 4))
@quick
def test_by_length_parts_are_even_and_ordered(lengths: list[int], count: int) -> None:
    parts = split_by_length(lengths, range(len(lengths)), count)
    assert len(parts) == count and sorted(row for part in parts for row in part) == list(range(len(lengths)))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    dealt = [lengths[row] for part in parts for row in part]
    assert dealt == sorted(lengths, reverse=True)


def test_number_of_passes_weighs_padding_against_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batches, "PASS_COST", 100)
    assert number_of_passes([[200, 190, 180, 170]], 1, 4) == 1  # padding costs less than a pass
    assert number_of_passes([[400, 390, 20, 10]], 1, 4) == 2  # short rows beside long ones cost more
    assert number_of_passes([[400, 390, 20, 10]], 3, 4) == 3
    assert number_of_passes([[300, 300], [300, 100]], 1, 2) == 1  # the worker with the most tokens decides


def test_deal_worked_example() -> None:
    length = {(0, 0): 9, (0, 1): 8, (0, 2): 7, (0, 3): 2, (0, 4): 2, (1, 3): 1}
    assert balance_rows(list(length), length.__getitem__, 2) == [[(0, 0), (0, 3), (0, 4)], [(0, 1), (0, 2), (1, 3)]]


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4), st.integers(1, 4), st.data())
@quick
def test_deal_each_row_once_and_as_many_for_each(rows: list[int], workers: int, data: st.DataObject) -> None:
    length = {(0, at): tokens for at, tokens in enumerate(rows * workers)}
    hands = balance_rows(data.draw(st.permutations(list(length))), length.__getitem__, workers)
    assert [len(hand) for hand in hands] == [len(rows)] * workers
    assert sorted(place for hand in hands for place in hand) == sorted(length)
    assert hands == balance_rows(list(length), length.__getitem__, workers)  # in whichever order they come
    totals = [sum(length[place] for place in hand) for hand in hands]
    assert max(totals) - min(totals) <= max(rows)


# trimmed and stacked


def test_trimmed_cuts_only_columns_of_padding() -> None:
    batch = {
        "prompt_ids": torch.tensor([[0, 0, 5], [0, 6, 7]]),
        "prompt_mask": torch.tensor([[0, 0, 1], [0, 1, 1]]),
        "completion_ids": torch.tensor([[8, 0, 0, 0], [9, 9, 0, 0]]),
        "completion_mask": torch.tensor([[1, 0, 0, 0], [1, 1, 0, 0]]),
        "importance_sampling_ratio": torch.ones(2, 1),
        "num_items_in_batch": torch.tensor(3),
    }
    cut = trim_padding(batch)
    assert cut["prompt_ids"].tolist() == [[0, 5], [6, 7]]
    assert cut["completion_ids"].tolist() == [[8, 0], [9, 9]]
    assert cut["importance_sampling_ratio"].shape == (2, 1) and cut["num_items_in_batch"] is batch["num_items_in_batch"]
    nothing = batch | {"completion_mask": torch.zeros(2, 4)}
    assert trim_padding(nothing)["completion_ids"].shape == (2, 1)
    assert trim_padding(batch, prompts=False)["prompt_ids"] is batch["prompt_ids"]
    assert trim_padding(batch, completions=False)["completion_ids"] is batch["completion_ids"]


def tokens(batch: dict[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Return each row's tokens without padding."""
    sides = [zip(batch[f"{side}_ids"], batch[f"{side}_mask"].bool(), strict=True) for side in ("prompt", "completion")]
    return [tuple(ids[mask].tolist() for ids, mask in row) for row in zip(*sides, strict=True)]


@given(ROWS, st.integers(1, 3))
@quick
def test_trimmed_keeps_all_tokens(rows: Any, extra: int) -> None:
    cut = trim_padding(batch_of(rows, extra))
    assert tokens(cut) == tokens(batch_of(rows, extra))
    assert cut["prompt_ids"].shape[1] == max(prompt for prompt, _, _ in rows)
    assert cut["completion_ids"].shape[1] == max(1, *(completion for _, completion, _ in rows))


@given(ROWS, ROWS)
@quick
def test_stacked_keeps_all_tokens(first: Any, second: Any) -> None:
    parts = [batch_of(first, 0), batch_of(second, 2)]
    assert tokens(stack_batches(parts)) == tokens(parts[0]) + tokens(parts[1])
    assert stack_batches(parts)["advantages"].tolist() == [advantage for _, _, advantage in first + second]


# shifted and packed


@given(ROWS)
@quick
def test_shifted_and_packed_spread_values_back(rows: Any) -> None:
    """Both give a model the same tokens, and each value of a token is returned at that token's column."""
    batch = batch_of(rows)
    ids, mask = (torch.cat([batch[f"prompt_{each}"], batch[f"completion_{each}"]], dim=1) for each in ("ids", "mask"))
    width = batch["completion_ids"].shape[1]
    sequences = [prompt + completion for prompt, completion in tokens(batch)]

    moved = shift_rows(ids, mask, width)
    longest = max(map(len, sequences))
    assert moved.input_ids.tolist() == [each + [0] * (longest - len(each)) for each in sequences]
    labels = [
        [-100] * len(prompt) + completion + [-100] * (longest - len(prompt + completion))
        for prompt, completion in tokens(batch)
    ]
    assert moved.labels.tolist() == labels
    assert torch.equal(moved.spread(moved.input_ids[:, 1:].double()), batch["completion_ids"].double())

    line = pack_rows(ids, mask, width)
    assert line.input_ids.tolist() == [[token for each in sequences for token in each]]
    assert line.position_ids.tolist() == [[at for each in sequences for at in range(len(each))]]
    labels = [[-100] * len(prompt) + completion for prompt, completion in tokens(batch)]
    assert line.labels.tolist() == [[label for each in labels for label in each]]
    assert torch.equal(line.spread(line.input_ids[:, 1:].double(), width), batch["completion_ids"].double())


# Masks


def test_loss_mask_and_has_gradient_worked_example() -> None:
    batch = batch_of([(1, 2, 1.0), (1, 2, 0.0), (1, 0, 1.0), (1, 1, -1.0)], extra=0)
    assert loss_mask(batch).tolist() == [[1, 1], [1, 1], [0, 0], [1, 0]]
    assert has_gradient(batch).tolist() == [True, False, False, True]
    by_tool = batch | {"tool_mask": torch.tensor([[1, 0], [1, 1], [1, 1], [0, 1]])}
    assert loss_mask(by_tool).tolist() == [[1, 0], [1, 1], [0, 0], [0, 0]]
    assert has_gradient(by_tool).tolist() == [True, False, False, False]


def test_is_text_batch_with_images_false() -> None:
    batch = batch_of([(1, 1, 1.0)])
    assert is_text(batch) and is_text(batch | {"pixel_values": None})
    assert not is_text(batch | {"pixel_values": torch.zeros(1)})


# arrange


@given(
    rows=st.lists(ROWS, min_size=1, max_size=3),
    loss_type=st.sampled_from(LOSS_TYPES),
    fewer=st.booleans(),
    regroup=st.booleans(),
)
@quick
def test_arrange_loss_over_rows_left_is_loss_over_all(rows: Any, loss_type: str, fewer: bool, regroup: bool) -> None:
    """The sum over micro-batches of the loss, with each loss type's denominator, stays the same."""
    made = [batch_of(each, prompts=5, completions=6) for each in rows]
    all_tokens = max(sum(each["completion_mask"].sum().item() for each in made), 1)
    regroups = regroup and loss_type != "bnpo"
    savings = SavingsPlan(
        rows=True, regroup=regroups, share=regroups, fewer_passes=fewer and regroups, trim_prompts=True,
        trim_completions=True,
    )  # fmt: skip
    arranged, metrics = plan_micro_batches(made, savings, loss_type, Workers())
    expected = sum(losses(each, loss_type, all_tokens) for each in made)
    actual = sum(losses(batch, loss_type, all_tokens) * part.loss_factor for batch, part in arranged)
    assert actual == pytest.approx(expected, rel=1e-9, abs=1e-12)
    left = [batch for batch, _ in arranged]
    rows_left, rows_all = (sum(len(each["advantages"]) for each in some) for some in (left, made))
    assert rows_left >= 1  # one row at least proves the engine
    assert metrics["learner/completions_share"] == pytest.approx(rows_left / rows_all)
    tokens_left, tokens_all = (sum(each["completion_mask"].sum().item() for each in some) for some in (left, made))
    assert metrics["learner/tokens_saved"] == tokens_all - tokens_left


def test_arrange_mean_over_passes_left_is_mean_over_all_rows() -> None:
    made = [
        {
            "prompt_ids": torch.ones(4, 2), "prompt_mask": torch.ones(4, 2), "completion_ids": torch.ones(4, 3),
            "completion_mask": torch.ones(4, 3), "advantages": torch.tensor([1.0, 0.0, 0.0, signal]),
        }
        for signal in (0.0, 0.0, 1.0, 1.0)
    ]  # fmt: skip
    savings = SavingsPlan(rows=True, regroup=True, fewer_passes=True)
    arranged, metrics = plan_micro_batches(made, savings, "grpo", Workers())
    assert [len(batch["advantages"]) for batch, _ in arranged] == [0, 0, 3, 3]
    assert metrics["learner/completions_share"] == metrics["learner/positions_share"] == 6 / 16
    for weight in ("row_weight", "token_weight"):  # TRL takes a mean over the two passes
        assert sum(getattr(part, weight) for _, part in arranged[2:]) / 2 == 6 / 16
    assert [part.loss_factor for _, part in arranged] == [0, 0, 3 / 4, 3 / 4]


def test_arrange_rows_that_move_keep_all_values() -> None:
    """Two workers, in two threads of this process."""
    pots = [
        {
            "prompt_ids": torch.tensor([[0, 5 + rank], [3, 4]]), "prompt_mask": torch.tensor([[0, 1], [1, 1]]),
            "completion_ids": torch.tensor([[7, 7, 7], [8, 0, 0]]) + rank,
            "completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
            "advantages": torch.tensor([1.0, 2.0]) * (1 - rank), "num_items_in_batch": torch.tensor(4),
        }
        for rank in (0, 1)
    ]  # fmt: skip
    given_away: dict[Any, Any] = {}
    both_gave = threading.Barrier(2)

    def worker(rank: int) -> Workers:
        # The first worker has 6 positions to process; the second has 4, to prove its engine.
        def table(own: torch.Tensor) -> torch.Tensor:
            if len(own) != 6:
                return own[None]  # totals of the rows that were kept
            both = [[1, 1, 4, 3, 3, 1], [0, 0, 4, 3, 3, 1]]
            assert own.tolist() == both[rank]
            return torch.tensor(both, dtype=torch.float)

        def exchange(away: Any) -> Any:
            given_away.update(away)
            both_gave.wait(60)
            return given_away

        return Workers(rank, table, exchange)

    savings = SavingsPlan(rows=True, regroup=True, share=True)
    with ThreadPoolExecutor(2) as threads:
        made = threads.map(lambda rank: plan_micro_batches([pots[rank]], savings, "grpo", worker(rank))[0][0], (0, 1))
    (first, _), (second, part) = made
    # Three rows are needed, and a fourth gives both workers two: the longest with the shortest, and the two between.
    assert first["advantages"].tolist() == [1.0, 0.0] and first["completion_ids"].tolist() == [[7, 7, 7], [9, 0, 0]]
    assert second["advantages"].tolist() == [0.0, 2.0] and part.loss_factor == 1.0
    assert second["completion_ids"].tolist() == [[8, 8, 8], [8, 0, 0]]
    assert second["prompt_ids"].tolist() == [[0, 6], [3, 4]] and second["num_items_in_batch"].item() == 4
