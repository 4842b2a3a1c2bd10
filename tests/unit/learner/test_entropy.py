"""Tests of the entropy terms of a step, with numbers worked by hand."""

import torch

from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.entropy import EntropyTokens, entropy_bonus_correction, select_high_entropy

ENTROPIES = [torch.tensor([[0.0, 4.0, 9.0]]), torch.tensor([[1.0, 3.0, 2.0]])]
MASKS = [torch.tensor([[1, 1, 0]]), torch.tensor([[1, 1, 1]])]  # 9.0 is padding


def test_select_high_entropy_quantile_is_of_all_micro_batches() -> None:
    # Of 0, 1, 2, 3, 4 the quantile 0.8 is 0.8 * 4 = 3.2; of the second micro-batch alone it would be 2.6, below its 3.
    first, second = select_high_entropy(ENTROPIES, MASKS, 0.8, Workers())
    assert first.mask.tolist() == [[False, True, False]]
    assert second.mask.tolist() == [[False, False, False]]
    assert first.in_step == second.in_step == 1


def test_select_high_entropy_interpolates_as_torch_does() -> None:
    values = torch.tensor([[0.1, 0.5, 0.7, 1.9]])
    for quantile in (0.0, 0.2, 0.5, 0.9, 1.0):
        (tokens,) = select_high_entropy([values], [torch.ones(1, 4)], quantile, Workers())
        assert torch.equal(tokens.mask, values >= torch.quantile(values, quantile))


def test_select_high_entropy_includes_other_workers_tokens() -> None:
    def gather(own: torch.Tensor) -> torch.Tensor:
        if own.dtype == torch.long:  # the other worker has 2 tokens, of 5 and 6 nats
            return torch.stack([own, torch.tensor([2])])
        return torch.stack([own, torch.tensor([5.0, 6.0, 0.0, 0.0, 0.0])])

    # Of 0, 1, 2, 3, 4, 5, 6 the quantile 0.5 is 3.
    tokens = select_high_entropy(ENTROPIES, MASKS, 0.5, Workers(count=2, gather=gather))
    assert [each.mask.tolist() for each in tokens] == [[[False, True, False]], [[False, True, False]]]
    assert tokens[0].in_step == 4


def test_select_high_entropy_no_tokens_selects_none() -> None:
    (tokens,) = select_high_entropy([torch.ones(1, 2)], [torch.zeros(1, 2)], 0.5, Workers())
    assert not tokens.mask.any() and tokens.in_step == 0


def test_entropy_bonus_correction_makes_mean_of_the_step() -> None:
    # 1 token with the sum 0, 3 with the sum 6: TRL adds 0/1/2 + 6/3/2 = 1, and the mean of the step is 6/4.
    masks = [torch.tensor([[1, 0, 0]]), torch.tensor([[1, 1, 1]])]
    in_step = torch.tensor(4)
    corrections = [
        entropy_bonus_correction(entropies, EntropyTokens(mask, in_step), micro_batches=2, workers=1).item()
        for entropies, mask in zip(ENTROPIES, masks, strict=True)
    ]
    assert sum(corrections) == 0.5


def test_entropy_bonus_correction_averages_over_workers() -> None:
    # Two workers with these tokens: the mean of TRL's means is (0/1 + 6/3) / 2 = 1, and the mean of the step is 6/4.
    masks = [torch.tensor([[1, 0, 0]]), torch.tensor([[1, 1, 1]])]
    corrections = [
        entropy_bonus_correction(entropies, EntropyTokens(mask, torch.tensor(4)), micro_batches=1, workers=2).item()
        for entropies, mask in zip(ENTROPIES, masks, strict=True)
    ]
    assert sum(corrections) / 2 == 0.5
