"""Masks of a batch, and selection, trimming, padding and concatenation of its rows."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_batches import ROWS, batch_of, tokens_of

from grpo_ray.learner.batch import (
    concatenate,
    follows_result,
    has_gradient,
    loss_mask,
    move_to,
    proof_logps,
    select_rows,
    trim_padding,
)

quick = settings(max_examples=60, deadline=None, derandomize=True)


# Masks


def test_loss_mask_and_has_gradient_worked_example() -> None:
    batch = batch_of([(1, 2, 1.0), (1, 2, 0.0), (1, 0, 1.0), (1, 1, -1.0)], extra=0)
    assert loss_mask(batch).tolist() == [[1, 1], [1, 1], [0, 0], [1, 0]]
    assert has_gradient(batch).tolist() == [True, False, False, True]
    by_tool = batch | {"tool_mask": torch.tensor([[1, 0], [1, 1], [1, 1], [0, 1]])}
    assert loss_mask(by_tool).tolist() == [[1, 0], [1, 1], [0, 0], [0, 0]]
    assert has_gradient(by_tool).tolist() == [True, False, False, False]


def test_follows_result_marks_tokens_of_later_turns() -> None:
    batch = {"completion_mask": torch.tensor([[1, 1, 1, 1, 0], [1, 1, 0, 0, 0]])}
    assert not follows_result(batch).any()  # without tools there is one turn
    turns = batch | {"tool_mask": torch.tensor([[1, 0, 1, 1, 0], [1, 1, 0, 0, 0]])}
    # From the result on, to the end of the row.
    assert follows_result(turns).tolist() == [[False, True, True, True, True], [False] * 5]


# trim_padding and concatenate


def test_trim_padding_cuts_only_columns_of_padding() -> None:
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


@given(ROWS, st.integers(1, 3))
@quick
def test_trim_padding_keeps_all_tokens_of(rows: Any, extra: int) -> None:
    cut = trim_padding(batch_of(rows, extra))
    assert tokens_of(cut) == tokens_of(batch_of(rows, extra))
    assert cut["prompt_ids"].shape[1] == max(prompt for prompt, _, _ in rows)
    assert cut["completion_ids"].shape[1] == max(1, *(completion for _, completion, _ in rows))


@given(ROWS, ROWS)
@quick
def test_concatenate_keeps_all_tokens_of(first: Any, second: Any) -> None:
    parts = [batch_of(first, 0), batch_of(second, 2)]
    assert tokens_of(concatenate(parts)) == tokens_of(parts[0]) + tokens_of(parts[1])
    assert concatenate(parts)["advantages"].tolist() == [advantage for _, _, advantage in first + second]


def test_concatenate_widths_and_fill_worked_example() -> None:
    narrow = {"prompt_ids": torch.tensor([[5]]), "completion_ids": torch.tensor([[7]]), "scale": torch.tensor(3)}
    wide = {"prompt_ids": torch.tensor([[0, 6]]), "completion_ids": torch.tensor([[8, 9, 0]]), "scale": torch.tensor(4)}
    joined = concatenate([narrow, wide], {"completion_ids": 2}, {"prompt_ids": 77, "completion_ids": 78})
    assert joined["prompt_ids"].tolist() == [[77, 5], [0, 6]]  # as wide as the widest, padded on the left
    assert joined["completion_ids"].tolist() == [[7, 78], [8, 9]]  # padded and cut on the right
    assert joined["scale"].item() == 3


def test_select_rows_keeps_order_and_scalars() -> None:
    batch = batch_of([(1, 1, 1.0), (1, 1, 2.0), (1, 1, 3.0)]) | {"num_items_in_batch": torch.tensor(9)}
    chosen = select_rows(batch, [2, 0])
    assert chosen["advantages"].tolist() == [3.0, 1.0] and chosen["num_items_in_batch"].item() == 9
    assert len(select_rows(batch, [])["advantages"]) == 0


def test_proof_logps_with_filters_are_those_before() -> None:
    batch = {"sampling_per_token_logps": torch.tensor([[-0.5]])}
    assert proof_logps(batch).tolist() == [[-0.5]]
    assert proof_logps(batch | {"unprocessed_per_token_logps": torch.tensor([[-0.75]])}).tolist() == [[-0.75]]


def test_move_to_moves_tensors_only() -> None:
    moved = move_to({"ids": torch.zeros(2), "scale": 0.5}, "meta")
    assert moved["ids"].device.type == "meta" and moved["scale"] == 0.5
