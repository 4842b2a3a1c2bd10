"""How the engine draws a token on the CPU: exactly from its probabilities, with little noise (vLLM).

Every request has a seed of its own, and vLLM's samplers then draw an exponential number for each word of the
vocabulary, request by request, which took 29 % of the time in which a 20M model generates. Here the vocabulary is cut
into about as many blocks as a block has words, and a token takes one number for each block and one for each word of the
block that wins: 193 instead of 8,192, and 809 instead of 151,936.

One number and a search in the cumulated probabilities would do too, but what rounding adds to one word then moves all
the words behind it, and a completion must not change with the height of its batch (law 1). Computed for random logits
with an entropy of 1 nat and a rounding of 1e-6, the search draws another token once in 7,000 with 8,192 words and once
in 600 with 151,936; races, vLLM's and this one, once in 4,000,000. With a large vocabulary it is slower, too:
adding up in order takes longer than adding up in blocks.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch

LEAST = 2.0**-54
"""Stands for a uniform number of zero; all others are multiples of 2**-53."""


def forward(
    logits: torch.Tensor,
    generators: Mapping[int, torch.Generator],
    k: torch.Tensor | None,
    p: torch.Tensor | None,
    *,
    logprobs_mode: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stands in for the `forward` of vLLM's TopKTopPSampler, whose filters it keeps.

    logits: (B, V) float32, overwritten, as vLLM allows. generators: row -> its request's own generator; a row without
    one draws from torch's. k, p: (B,) each, None where no request has such a filter.
    Returns the tokens, (B,) int64, and what `logprobs_mode` says of all words, (B, V), or None.
    """
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p

    logits = apply_top_k_top_p(logits, k, p)
    if logprobs_mode == "processed_logprobs":
        logprobs = logits.log_softmax(dim=-1, dtype=torch.float32)
        # Into memory that is there: with a large vocabulary, getting new takes longer than the exponentials.
        return draw(torch.exp(logprobs, out=logits), generators), logprobs
    told = logits if logprobs_mode == "processed_logits" else None
    return draw(logits.softmax(dim=-1, dtype=torch.float32), generators), told


def draw(probabilities: torch.Tensor, generators: Mapping[int, torch.Generator]) -> torch.Tensor:
    """One token for each row of (B, V) probabilities, with the row's own generator: (B,) int64.

    A row's token depends on its probabilities and its generator alone.
    """
    rows, words = probabilities.shape
    uniform = torch.empty(rows, numbers_per_token(words), dtype=torch.float64)
    if len(generators) != rows:
        uniform.uniform_()
    for row, generator in generators.items():
        uniform[row].uniform_(generator=generator)
    return race(probabilities, uniform)


def race(probabilities: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """One token for each row, from numbers in [0, 1): first a block of words, then a word of the block.

    In each race everyone needs a time that is exponential with their probability as the rate, and the first has won:
    that is how probable they are (the exponential race, or Gumbel-max trick). The rates need not add up to one.

    probabilities: (B, V) float32. uniform: (B, numbers_per_token(V)) float64, overwritten. Returns (B,) int64. A word
    of probability zero never wins.
    """
    words = probabilities.shape[1]
    width = block_width(words)
    whole = words // width * width
    noise = uniform.clamp_(min=LEAST).log_().neg_()  # above zero, and 38 at most
    blocks = probabilities[:, :whole].unflatten(1, (-1, width)).sum(dim=-1)
    rest = probabilities[:, whole:].sum(
        dim=-1, keepdim=True
    )  # of the words past the last whole block; there may be none
    mass = torch.cat([blocks, rest], dim=1)
    # The larger rate / noise is the smaller time. In double precision, so that nothing above zero becomes zero.
    winner = (mass / noise[:, : mass.shape[1]]).argmax(dim=-1, keepdim=True)
    inside = winner * width + torch.arange(width)
    rates = probabilities.gather(1, inside.clamp(max=words - 1)).double().masked_fill_(inside >= words, 0.0)
    return inside.gather(1, (rates / noise[:, mass.shape[1] :]).argmax(dim=-1, keepdim=True)).squeeze(1)


def block_width(words: int) -> int:
    """Words in a block: a power of two near the root of all of them."""
    return 1 << math.ceil(math.log2(words) / 2)


def numbers_per_token(words: int) -> int:
    """Random numbers that a token takes: one for each block, the rest included, and one for each word of a block."""
    width = block_width(words)
    return words // width + 1 + width


def use_low_noise_sampler(sampler: Any) -> None:
    """Have vLLM's TopKTopPSampler, on the CPU, draw as this module does."""
    mode = sampler.logprobs_mode
    sampler.forward = lambda logits, generators, k, p: forward(logits, generators, k, p, logprobs_mode=mode)
