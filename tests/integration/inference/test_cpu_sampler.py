"""Tests of sampling inside vLLM's sampler: its filters, and the values it returns."""

from typing import Any

import pytest
import torch
from chi_square import p_value, seeded_generators
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler

from grpo_ray.inference.cpu_sampler import install_cpu_sampler, sampler_forward

pytestmark = pytest.mark.usefixtures("one_thread")


def processed(logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any = None, p: Any = None) -> Any:
    return sampler_forward(logits.clone(), generators, k, p, logprobs_mode="processed_logprobs")


def test_sampler_forward_any_number_of_threads_samples_the_same() -> None:
    logits = torch.randn(16, 32_003, generator=torch.Generator().manual_seed(0)) * 3
    sampled = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        sampled.append([each.tolist() for each in processed(logits, seeded_generators(16))])
    assert sampled[0] == sampled[1] == sampled[2]


FILTERS = {
    "none": (None, None),
    "top-k": (torch.tensor([1, 2, 50, 600] * 4, dtype=torch.int32), None),
    "top-p": (None, torch.tensor([1e-6, 0.3, 0.9, 1.0] * 4)),
    "both": (torch.tensor([600, 10, 10, 3] * 4, dtype=torch.int32), torch.tensor([0.8, 1.0, 0.5, 1e-6] * 4)),
}


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits", "raw_logprobs", "raw_logits"])
@pytest.mark.parametrize("name", FILTERS)
def test_sampler_forward_returns_the_values_that_vllm_returns(name: str, mode: str) -> None:
    logits = torch.randn(16, 600, generator=torch.Generator().manual_seed(0)) * 2
    k, p = FILTERS[name]

    def filters() -> list[Any]:
        return [None if each is None else each.clone() for each in (k, p)]  # vLLM overwrites them

    theirs = TopKTopPSampler(mode)
    _, expected = theirs.forward_native(logits.clone(), seeded_generators(16), *filters())
    ours = TopKTopPSampler(mode)
    install_cpu_sampler(ours)
    tokens, returned = ours(logits.clone(), seeded_generators(16), *filters())
    assert tokens.shape == (16,) and tokens.dtype == torch.int64
    if mode.startswith("raw"):
        assert returned is None and expected is None
    else:
        assert torch.equal(returned, expected)


@pytest.mark.parametrize("name", FILTERS)
def test_sampler_forward_filtered_tokens_are_never_sampled(name: str) -> None:
    logits = torch.randn(4, 600, generator=torch.Generator().manual_seed(0)) * 2
    k, p = FILTERS[name]
    rows = torch.arange(400)
    counts = torch.zeros(4, 600, dtype=torch.int64)
    returned = torch.empty(0)
    for first in range(0, 8000, 400):
        filters = [None if each is None else each[:4].repeat(100) for each in (k, p)]
        tokens, returned = processed(logits.repeat(100, 1), seeded_generators(400, first), *filters)
        counts.index_put_((rows % 4, tokens), torch.ones(400, dtype=torch.int64), accumulate=True)
    returned = returned[:4]
    assert counts[returned.isneginf()].sum() == 0
    for row in range(4):
        assert (returned[row] > -torch.inf).sum() == 1 or p_value(counts[row], returned[row].exp()) > 1e-3
