"""Completions of a sampler, their padding, and the selection of a rollout's rows."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from token_batches import batch_of

from grpo_ray.learner.rollouts.padding import Padding
from grpo_ray.learner.rollouts.rollout import Completions, Rollout

PADDING = Padding(token=99, multiple=None, ratio=None)
IDS = st.lists(st.integers(1, 90), max_size=9)


def test_padding_columns_worked_example() -> None:
    batch = PADDING.columns(Completions([[5], [6, 7]], [[8, 9], [1]], [[-0.5, None], [-2.0]]))
    assert batch["prompt_ids"].tolist() == [[99, 5], [6, 7]] and batch["prompt_mask"].tolist() == [[0, 1], [1, 1]]
    assert batch["completion_ids"].tolist() == [[8, 9], [1, 99]]
    assert batch["completion_mask"].tolist() == [[1, 1], [1, 0]]
    logps = batch["sampling_per_token_logps"]
    assert logps[0, 0] == -0.5 and logps[0, 1].isnan() and logps[1].tolist() == [-2.0, 0.0]
    assert batch.keys().isdisjoint({"tool_mask", "unprocessed_per_token_logps"})


def test_padding_columns_with_tools_and_filters() -> None:
    completions = Completions([[5]] * 2, [[8, 9], [1]], [[-1.0, 0.0], [-2.0]], [[-1.5, 0.0], [-2.5]], [[1, 0], [1]])
    batch = PADDING.columns(completions)
    assert batch["tool_mask"].tolist() == [[1, 0], [1, 1]]
    assert batch["unprocessed_per_token_logps"].tolist() == [[-1.5, 0.0], [-2.5, 0.0]]
    assert completions.lengths == [1, 1]


@given(
    rows=st.lists(st.tuples(IDS.filter(len), IDS), min_size=1, max_size=5),
    multiple=st.none() | st.integers(1, 8),
)
@settings(max_examples=60, deadline=None, derandomize=True)
def test_padding_columns_masks_select_the_tokens(rows: list[tuple[list[int], list[int]]], multiple: int | None) -> None:
    prompts, ids = [list(each) for each in zip(*rows, strict=True)]
    padding = Padding(token=99, multiple=multiple, ratio=None)
    batch = padding.columns(Completions(prompts, ids, [[-1.0] * len(row) for row in ids]))
    for name, lists in (("prompt", prompts), ("completion", ids)):
        width = batch[f"{name}_ids"].size(1)
        assert width == padding.width(max(map(len, lists))) and (multiple is None or width % multiple == 0)
        for row, mask, expected in zip(batch[f"{name}_ids"], batch[f"{name}_mask"].bool(), lists, strict=True):
            assert row[mask].tolist() == expected and set(row[~mask].tolist()) <= {99}


def test_rollout_take_some_in_the_given_order() -> None:
    rollout = Rollout(
        [{"index": 0}, {"index": 1}, {"index": 2}],
        [[1], [2, 2], [3]],
        torch.tensor([[0.0], [0.5], [1.0]]),
        batch_of([(1, 1, 1.0), (1, 1, 2.0), (1, 1, 3.0)]) | {"num_items_in_batch": torch.tensor(9)},
    )
    taken = rollout.take([2, 0])
    assert taken.rows == [{"index": 2}, {"index": 0}] and taken.token_ids == [[3], [1]]
    assert taken.rewards.tolist() == [[1.0], [0.0]] and taken.conversations is None
    assert taken.batch["advantages"].tolist() == [3.0, 1.0] and taken.batch["num_items_in_batch"].item() == 9


def test_rollout_to_moves_all_tensors() -> None:
    moved = Rollout([{}], [[1]], torch.zeros(1, 1), {"ids": torch.zeros(1)}).to("meta")
    assert moved.rewards.device.type == moved.batch["ids"].device.type == "meta"
