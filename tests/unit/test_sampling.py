"""Drawing a token from its probabilities: how often, whatever the batch, and what vLLM's sampler does around it."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from library_digest import digest
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler, apply_top_k_top_p, random_sample
from vllm.v1.sample.sampler import Sampler

from grpo_ray.sampling import block_width, draw, draw_with_little_noise, forward, numbers_per_token, race

# What we replace, and what stands around it. When one fails: read vLLM's change, see whether ours still holds, then
# write the new digest here.
BENEATH = {
    TopKTopPSampler.forward_native: "1e25771591a6",
    TopKTopPSampler.forward_cpu: "e17ce26d43cf",
    apply_top_k_top_p: "9c60cfe73d70",
    random_sample: "b61922ea8e06",
    Sampler.forward: "4ddbe156abd2",
    Sampler.sample: "bd7549a66763",
}


@pytest.mark.parametrize("function", BENEATH, ids=lambda function: function.__qualname__)
def test_vllm_has_not_changed_beneath_what_is_replaced(function: Callable[..., Any]) -> None:
    assert digest(function) == BENEATH[function]


pytestmark = pytest.mark.usefixtures("one_thread")


def seeded(rows: int, first: int = 0) -> dict[int, torch.Generator]:
    return {row: torch.Generator().manual_seed(first + row) for row in range(rows)}


def zipf(words: int) -> torch.Tensor:
    """Probabilities that fall with the rank, the ranks spread over the vocabulary: (V,) float32."""
    shuffled = torch.randperm(words, generator=torch.Generator().manual_seed(words))
    weights = 1.0 / (1 + shuffled.double())
    return (weights / weights.sum()).float()


def chance(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    """Chance of counts at least as far from the probabilities as these are, by the chi-square test.

    Words expected less than ten times count as one.
    """
    expected = probabilities.double() * counts.sum()
    rare = expected < 10
    counts = torch.cat([counts[~rare].double(), counts[rare].sum()[None].double()])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    there = expected > 0
    assert counts[~there].sum() == 0
    if there.sum() == 1:
        return 1.0
    statistic = ((counts - expected)[there] ** 2 / expected[there]).sum()
    return float(torch.special.gammaincc((there.sum() - 1) / 2, (statistic / 2).float()))


def counted(probabilities: torch.Tensor, draws: Iterator[torch.Tensor]) -> torch.Tensor:
    return sum(torch.bincount(tokens, minlength=len(probabilities)) for tokens in draws)  # type: ignore[return-value]


DISTRIBUTIONS = {
    "one word": torch.ones(1),
    "two words": torch.tensor([0.3, 0.7]),
    "some of them zero": torch.tensor([0.0, 0.1, 0.0, 0.2, 0.0, 0.0, 0.7, 0.0, 0.0]),
    "flat, in whole blocks": torch.full((1024,), 1 / 1024),
    "flat, with a rest": torch.full((1000,), 1 / 1000),
    "all in the rest": torch.tensor([0.0] * 16 + [0.25, 0.75]),
    "steep": zipf(8192),
    "steep, with a rest": zipf(5003),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_many_requests_draw_each_word_as_often_as_it_is_probable(name: str) -> None:
    probabilities = DISTRIBUTIONS[name]
    rows = 500
    batch = probabilities.repeat(rows, 1)
    counts = counted(probabilities, (draw(batch, seeded(rows, first)) for first in range(0, 20_000, rows)))
    assert chance(counts, probabilities) > 1e-3


def test_one_request_draws_each_word_as_often_as_it_is_probable_token_after_token() -> None:
    probabilities = zipf(50)
    generators = seeded(1)
    counts = counted(probabilities, (draw(probabilities[None], generators) for _ in range(20_000)))
    assert chance(counts, probabilities) > 1e-3


def test_two_tokens_of_a_request_know_nothing_of_each_other() -> None:
    probabilities = zipf(10)
    batch = probabilities.repeat(500, 1)
    pairs = (
        draw(batch, generators) * 10 + draw(batch, generators)
        for generators in (seeded(500, first) for first in range(0, 20_000, 500))
    )
    both = (probabilities[:, None] * probabilities).flatten()
    assert chance(counted(both, pairs), both) > 1e-3


def test_requests_without_a_seed_draw_each_word_as_often_as_it_is_probable() -> None:
    probabilities = zipf(100)
    torch.manual_seed(0)
    counts = counted(probabilities, (draw(probabilities.repeat(501, 1), seeded(1)) for _ in range(40)))
    counts[draw(probabilities[None], seeded(1))] -= 40  # of the one that has a seed
    assert chance(counts, probabilities) > 1e-3


def test_counts_that_are_five_percent_off_would_be_noticed() -> None:
    probabilities = zipf(100)
    wrong = probabilities.clone()
    wrong[::2] *= 1.05
    wrong /= wrong.sum()
    counts = counted(
        probabilities, (draw(wrong.repeat(500, 1), seeded(500, first)) for first in range(0, 100_000, 500))
    )
    assert chance(counts, probabilities) < 1e-6 and chance(counts, wrong) > 1e-3


@pytest.mark.parametrize("words", [30, 8192, 32_003])
def test_a_request_draws_the_same_alone_and_in_any_batch(words: int) -> None:
    logits = torch.randn(24, words, generator=torch.Generator().manual_seed(0)) * 3
    probabilities = logits.softmax(-1)
    whole = draw(probabilities, seeded(24)).tolist()
    assert len(set(whole)) > 1
    alone = [int(draw(probabilities[row : row + 1], {0: seeded(24)[row]})) for row in range(24)]
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist()
    turned = dict(reversed([(place, seeded(24)[row]) for place, row in enumerate(order)]))
    shuffled = draw(probabilities[order], turned).tolist()
    beside_unseeded = draw(probabilities.repeat(2, 1), seeded(24))[:24].tolist()
    assert alone == whole
    assert shuffled == [whole[row] for row in order]
    assert beside_unseeded == whole


def test_the_number_of_threads_changes_no_draw() -> None:
    logits = torch.randn(16, 32_003, generator=torch.Generator().manual_seed(0)) * 3
    drawn = []
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        drawn.append([each.tolist() for each in processed(logits, seeded(16))])
    assert drawn[0] == drawn[1] == drawn[2]


def test_rounding_changes_a_draw_as_rarely_as_it_changes_probabilities() -> None:
    # A search in cumulated probabilities fails here: what is added to one word moves all the words behind it.
    generator = torch.Generator().manual_seed(0)
    changed = searched = 0
    for first in range(0, 4000, 200):
        logits = torch.randn(200, 8192, generator=generator) * 2
        logits[:, :8] += 8
        other = (logits + 1e-4 * torch.randn(200, 8192, generator=generator)).softmax(-1)
        logits = logits.softmax(-1)
        changed += int((draw(logits, seeded(200, first)) != draw(other, seeded(200, first))).sum())
        u = torch.rand(200, 1, generator=generator, dtype=torch.float64)
        found, again = (torch.searchsorted(each.cumsum(-1, dtype=torch.float64), u) for each in (logits, other))
        searched += int((found != again).sum())
    assert changed <= 5 < searched


@pytest.mark.parametrize("blocks", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("inside", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("words", [1, 7, 16, 1000])
def test_no_random_number_draws_a_word_of_probability_zero_or_past_the_end(
    words: int, blocks: float, inside: float
) -> None:
    numbers = numbers_per_token(words)
    for least in (1.0, 1e-30, 1e-45):  # the last is no normal number any more
        probabilities = torch.zeros(words, words).fill_diagonal_(least)
        uniform = torch.full((words, numbers), blocks, dtype=torch.float64)
        uniform[:, numbers - block_width(words) :] = inside
        assert race(probabilities, uniform).tolist() == list(range(words))


def test_the_most_contrary_numbers_draw_no_word_of_probability_zero() -> None:
    # Everyone with a chance gets the longest time there is, everyone without the shortest.
    probabilities = torch.zeros(1, 100)
    probabilities[0, [37, 99]] = torch.tensor([1e-45, 1e-38])
    width = block_width(100)
    uniform = torch.full((1, numbers_per_token(100)), 1 - 2.0**-53, dtype=torch.float64)
    uniform[0, [37 // width, 99 // width]] = 0.0
    uniform[0, [-width + 37 % width, -width + 99 % width]] = 0.0
    assert int(race(probabilities, uniform)) in (37, 99)


def test_a_vocabulary_takes_few_numbers() -> None:
    assert [numbers_per_token(words) for words in (1, 8192, 151_936)] == [3, 64 + 1 + 128, 296 + 1 + 512]


def processed(logits: torch.Tensor, generators: dict[int, torch.Generator], k: Any = None, p: Any = None) -> Any:
    return forward(logits.clone(), generators, k, p, logprobs_mode="processed_logprobs")


FILTERS = {
    "none": (None, None),
    "top-k": (torch.tensor([1, 2, 50, 600] * 4, dtype=torch.int32), None),
    "top-p": (None, torch.tensor([1e-6, 0.3, 0.9, 1.0] * 4)),
    "both": (torch.tensor([600, 10, 10, 3] * 4, dtype=torch.int32), torch.tensor([0.8, 1.0, 0.5, 1e-6] * 4)),
}


@pytest.mark.parametrize("mode", ["processed_logprobs", "processed_logits", "raw_logprobs", "raw_logits"])
@pytest.mark.parametrize("name", FILTERS)
def test_what_is_told_of_all_words_is_what_vllm_tells(name: str, mode: str) -> None:
    logits = torch.randn(16, 600, generator=torch.Generator().manual_seed(0)) * 2
    k, p = FILTERS[name]

    def filters() -> list[Any]:
        return [None if each is None else each.clone() for each in (k, p)]  # vLLM overwrites them

    theirs = TopKTopPSampler(mode)
    _, expected = theirs.forward_native(logits.clone(), seeded(16), *filters())
    ours = TopKTopPSampler(mode)
    draw_with_little_noise(ours)
    tokens, told = ours(logits.clone(), seeded(16), *filters())
    assert tokens.shape == (16,) and tokens.dtype == torch.int64
    if mode.startswith("raw"):
        assert told is None and expected is None
    else:
        assert torch.equal(told, expected)


@pytest.mark.parametrize("name", FILTERS)
def test_filtered_words_are_never_drawn_and_the_others_as_often_as_told(name: str) -> None:
    logits = torch.randn(4, 600, generator=torch.Generator().manual_seed(0)) * 2
    k, p = FILTERS[name]
    rows = torch.arange(400)
    counts = torch.zeros(4, 600, dtype=torch.int64)
    told = torch.empty(0)
    for first in range(0, 8000, 400):
        filters = [None if each is None else each[:4].repeat(100) for each in (k, p)]
        tokens, told = processed(logits.repeat(100, 1), seeded(400, first), *filters)
        counts.index_put_((rows % 4, tokens), torch.ones(400, dtype=torch.int64), accumulate=True)
    told = told[:4]
    assert counts[told.isneginf()].sum() == 0
    for row in range(4):
        assert (told[row] > -torch.inf).sum() == 1 or chance(counts[row], told[row].exp()) > 1e-3
