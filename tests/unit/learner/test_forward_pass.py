"""Rows that are shifted or packed for a forward pass, and their values brought back to TRL's columns."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given, settings
from token_batches import ROWS, batch_of, tokens_of

from grpo_ray.learner.forward_pass import pack_rows, score_rows, score_tokens, shift_rows

quick = settings(max_examples=60, deadline=None, derandomize=True)


@given(ROWS)
@quick
def test_shift_and_pack_rows_spread_values_back(rows: Any) -> None:
    """Shifting and packing give a model the same tokens, and return each token's value at that token's column."""
    batch = batch_of(rows)
    ids, mask = (torch.cat([batch[f"prompt_{each}"], batch[f"completion_{each}"]], dim=1) for each in ("ids", "mask"))
    width = batch["completion_ids"].shape[1]
    sequences = [prompt + completion for prompt, completion in tokens_of(batch)]

    moved = shift_rows(ids, mask, width)
    longest = max(map(len, sequences))
    assert moved.input_ids.tolist() == [each + [0] * (longest - len(each)) for each in sequences]
    labels = [
        [-100] * len(prompt) + completion + [-100] * (longest - len(prompt + completion))
        for prompt, completion in tokens_of(batch)
    ]
    assert moved.labels.tolist() == labels
    assert torch.equal(moved.spread(moved.input_ids[:, 1:].double()), batch["completion_ids"].double())

    line = pack_rows(ids, mask, width)
    assert line.input_ids.tolist() == [[token for each in sequences for token in each]]
    lengths = [len(each) for each in sequences]
    assert line.starts.tolist() == [sum(lengths[:row]) for row in range(len(lengths) + 1)]
    assert line.starts.dtype == torch.int32 and line.longest == max(lengths)
    assert line.position_ids.tolist() == [[at for each in sequences for at in range(len(each))]]
    labels = [[-100] * len(prompt) + completion for prompt, completion in tokens_of(batch)]
    assert line.labels.tolist() == [[label for each in labels for label in each]]
    assert torch.equal(line.spread(line.input_ids[:, 1:].double(), width), batch["completion_ids"].double())


def test_score_rows_parts_return_in_the_order_of_rows() -> None:
    class Model:
        """Scores each token by itself, and its entropy by its negative."""

        def __call__(self, input_ids: torch.Tensor, **inputs: Any) -> SimpleNamespace:
            values = input_ids[:, 1:].double()
            return SimpleNamespace(log_probs=values, entropy=-values)

    batch = batch_of([(2, 3, 0.0), (1, 5, 0.0), (4, 1, 0.0)])
    ids, mask = (torch.cat([batch[f"prompt_{each}"], batch[f"completion_{each}"]], dim=1) for each in ("ids", "mask"))
    width = batch["completion_ids"].shape[1]
    for layout in ("shifted", "packed"):
        logps, entropies = score_rows(layout, Model(), ids, mask, width, nullcontext, [[2, 0], [1]])
        assert torch.equal(logps, batch["completion_ids"].double())
        assert entropies is not None and torch.equal(entropies, -logps)


def test_score_rows_model_without_entropies_returns_none() -> None:
    class Model:
        """Scores each token by itself, as TRL's reference model."""

        def __call__(self, input_ids: torch.Tensor, fused_lm_head: bool, **inputs: Any) -> SimpleNamespace:
            assert fused_lm_head and not torch.is_grad_enabled()
            return SimpleNamespace(log_probs=input_ids[:, 1:].double(), entropy=None)

    batch = batch_of([(2, 3, 0.0), (1, 5, 0.0)])
    ids, mask = (torch.cat([batch[f"prompt_{each}"], batch[f"completion_{each}"]], dim=1) for each in ("ids", "mask"))
    width = batch["completion_ids"].shape[1]
    for layout in ("shifted", "packed"):
        logps, entropies = score_rows(layout, Model(), ids, mask, width, nullcontext, [[1], [0]])
        assert torch.equal(logps, batch["completion_ids"].double()) and entropies is None


def test_score_tokens_packed_passes_one_row_and_shifted_all() -> None:
    passed = []

    class Model:
        """Scores each token by itself, and records the shape of its input."""

        def __call__(self, input_ids: torch.Tensor, **inputs: Any) -> SimpleNamespace:
            passed.append(tuple(input_ids.shape))
            return SimpleNamespace(log_probs=input_ids[:, 1:].double(), entropy=None)

    batch = batch_of([(2, 3, 0.0), (1, 5, 0.0)])
    ids, mask = (torch.cat([batch[f"prompt_{each}"], batch[f"completion_{each}"]], dim=1) for each in ("ids", "mask"))
    for layout in ("shifted", "packed"):
        score_tokens(layout, Model(), ids, mask, batch["completion_ids"].shape[1], nullcontext())
    assert passed == [(2, 6), (1, 11)]  # 1 + 5 tokens in the longer row; 2 + 3 + 1 + 5 in all


def test_packed_rows_are_the_arguments_of_flash_attention() -> None:
    batch = batch_of([(2, 3, 0.0), (1, 1, 0.0)])
    ids, mask = (torch.cat([batch[f"prompt_{each}"], batch[f"completion_{each}"]], dim=1) for each in ("ids", "mask"))
    packed = pack_rows(ids, mask, batch["completion_ids"].shape[1])
    inputs = packed.model_inputs
    assert inputs["cu_seq_lens_q"].tolist() == inputs["cu_seq_lens_k"].tolist() == [0, 5, 7]
    assert inputs["max_length_q"] == inputs["max_length_k"] == 5
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3, 4, 0, 1]]
    assert inputs["input_ids"] is packed.input_ids and inputs["labels"] is packed.labels
