"""Drawing of tokens inside vLLM's sampler: the code that is replaced, its filters, and the values it returns."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from chi_square import chance, seeded
from library_digest import digest
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p, random_sample
from vllm.v1.sample.sampler import Sampler

from grpo_ray.inference.cpu_sampler import forward, use_low_noise_sampler

pytestmark = pytest.mark.usefixtures("one_thread")

# The replaced function and its callers. When one fails: read vLLM's change, check that the replacement is still right,
# then write the new digest here.
BENEATH = {
    TopKTopPSampler.forward_native: "1e25771591a6",
    TopKTopPSampler.forward_cpu: "e17ce26d43cf",
    apply_top_k_top_p: "9c60cfe73d70",
    random_sample: "b61922ea8e06",
    Sampler.forward: "4ddbe156abd2",
    Sampler.sample: "bd7549a66763",
}


@pytest.mark.parametrize("function", BENEATH, ids=lambda function: function.__qualname__)
def test_vllm_code_beneath_the_sampler_is_unchanged(function: Callable[..., Any]) -> None:
    assert digest(function) == BENEATH[function]


def processed(logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any = None, p: Any = None) -> Any:
    return forward(logits.clone(), generators, k, p, logprobs_mode="processed_logprobs")


def test_forward_any_number_of_threads_draws_the_same() -> None:
    logits = torch.randn(16, 32_003, generator=torch.Generator().manual_seed(0)) * 3
    drawn = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        drawn.append([each.tolist() for each in processed(logits, seeded(16))])
    assert drawn[0] == drawn[1] == drawn[2]


FILTERS = {
    "none": (None, None),
    "top-k": (torch.tensor([1, 2, 50, 600] * 4, dtype=torch.int32), None),
    "top-p": (None, torch.tensor([1e-6, 0.3, 0.9, 1.0] * 4)),
    "both": (torch.tensor([600, 10, 10, 3] * 4, dtype=torch.int32), torch.tensor([0.8, 1.0, 0.5, 1e-6] * 4)),
}


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits", "raw_logprobs", "raw_logits"])
@pytest.mark.parametrize("name", FILTERS)
def test_forward_returns_the_values_that_vllm_returns(name: str, mode: str) -> None:
    logits = torch.randn(16, 600, generator=torch.Generator().manual_seed(0)) * 2
    k, p = FILTERS[name]

    def filters() -> list[Any]:
        return [None if each is None else each.clone() for each in (k, p)]  # vLLM overwrites them

    theirs = TopKTopPSampler(mode)
    _, expected = theirs.forward_native(logits.clone(), seeded(16), *filters())
    ours = TopKTopPSampler(mode)
    use_low_noise_sampler(ours)
    tokens, returned = ours(logits.clone(), seeded(16), *filters())
    assert tokens.shape == (16,) and tokens.dtype == torch.int64
    if mode.startswith("raw"):
        assert returned is None and expected is None
    else:
        assert torch.equal(returned, expected)


@pytest.mark.parametrize("name", FILTERS)
def test_forward_draws_no_filtered_word_and_others_exactly(name: str) -> None:
    logits = torch.randn(4, 600, generator=torch.Generator().manual_seed(0)) * 2
    k, p = FILTERS[name]
    rows = torch.arange(400)
    counts = torch.zeros(4, 600, dtype=torch.int64)
    returned = torch.empty(0)
    for first in range(0, 8000, 400):
        filters = [None if each is None else each[:4].repeat(100) for each in (k, p)]
        tokens, returned = processed(logits.repeat(100, 1), seeded(400, first), *filters)
        counts.index_put_((rows % 4, tokens), torch.ones(400, dtype=torch.int64), accumulate=True)
    returned = returned[:4]
    assert counts[returned.isneginf()].sum() == 0
    for row in range(4):
        assert (returned[row] > -torch.inf).sum() == 1 or chance(counts[row], returned[row].exp()) > 1e-3
