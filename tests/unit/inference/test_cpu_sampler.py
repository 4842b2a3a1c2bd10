"""Drawing tokens from probabilities: frequencies, independence of the batch, and words of probability zero."""

from collections.abc import Iterator

import pytest
import torch
from chi_square import chance, seeded
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from grpo_ray.inference.cpu_sampler import block_width, draw, numbers_per_token, race

pytestmark = pytest.mark.usefixtures("one_thread")


def zipf(words: int) -> torch.Tensor:
    """Probabilities that fall with the rank, the ranks in random order: (V,) float32."""
    shuffled = torch.randperm(words, generator=torch.Generator().manual_seed(words))
    weights = 1.0 / (1 + shuffled.double())
    return (weights / weights.sum()).float()


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
def test_draw_frequencies_match_probabilities(name: str) -> None:
    probabilities = DISTRIBUTIONS[name]
    rows = 500
    batch = probabilities.repeat(rows, 1)
    counts = counted(probabilities, (draw(batch, seeded(rows, first)) for first in range(0, 20_000, rows)))
    assert chance(counts, probabilities) > 1e-3


def test_draw_one_generator_again_and_again_is_exact() -> None:
    probabilities = zipf(50)
    # One generator for all rows gives the numbers of one token after the other, without 20,000 calls.
    generator = torch.Generator().manual_seed(0)
    batch, generators = probabilities.repeat(500, 1), dict.fromkeys(range(500), generator)
    draws = [draw(batch, generators) for _ in range(40)]
    assert chance(counted(probabilities, iter(draws)), probabilities) > 1e-3
    alone = seeded(1)
    assert [int(draw(probabilities[None], alone)) for _ in range(100)] == draws[0][:100].tolist()


def test_draw_two_tokens_of_a_request_are_independent() -> None:
    probabilities = zipf(10)
    batch = probabilities.repeat(500, 1)
    pairs = (
        draw(batch, generators) * 10 + draw(batch, generators)
        for generators in (seeded(500, first) for first in range(0, 20_000, 500))
    )
    both = (probabilities[:, None] * probabilities).flatten()
    assert chance(counted(both, pairs), both) > 1e-3


def test_draw_unseeded_frequencies_match_probabilities() -> None:
    probabilities = zipf(100)
    torch.manual_seed(0)
    counts = counted(probabilities, (draw(probabilities.repeat(501, 1), seeded(1)) for _ in range(40)))
    counts[draw(probabilities[None], seeded(1))] -= 40  # of the one that has a seed
    assert chance(counts, probabilities) > 1e-3


def test_chance_five_percent_off_is_rejected() -> None:
    probabilities = zipf(100)
    wrong = probabilities.clone()
    wrong[::2] *= 1.05
    wrong /= wrong.sum()
    counts = counted(
        probabilities, (draw(wrong.repeat(500, 1), seeded(500, first)) for first in range(0, 100_000, 500))
    )
    assert chance(counts, probabilities) < 1e-6 and chance(counts, wrong) > 1e-3


@pytest.mark.parametrize("words", [30, 8192, 32_003])
def test_draw_same_token_alone_and_in_any_batch(words: int) -> None:
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


def test_draw_rounding_changes_fewer_tokens_than_a_search() -> None:
    # A search in cumulated probabilities fails here: a change of one word moves all words behind it.
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


UNIFORM = st.floats(0.0, 1.0, exclude_max=True)  # the largest is 1 - 2**-53
LEAST = st.sampled_from([1.0, 1e-30, 1e-45])  # the last is a subnormal number


@given(words=st.integers(1, 200), least=LEAST, block=UNIFORM, inside=UNIFORM)
@example(words=1000, least=1e-45, block=0.0, inside=1 - 2.0**-53)
@example(words=1000, least=1e-45, block=1 - 2.0**-53, inside=0.0)
@example(words=1, least=1e-45, block=1 - 2.0**-53, inside=1 - 2.0**-53)
@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_race_only_possible_word_always_wins(words: int, least: float, block: float, inside: float) -> None:
    numbers = numbers_per_token(words)
    probabilities = torch.zeros(words, words).fill_diagonal_(least)
    uniform = torch.full((words, numbers), block, dtype=torch.float64)
    uniform[:, numbers - block_width(words) :] = inside
    assert race(probabilities, uniform).tolist() == list(range(words))


@given(words=st.integers(2, 120), possible=st.sets(st.integers(0, 119), min_size=1, max_size=3), data=st.data())
@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_race_any_numbers_draw_a_possible_word(words: int, possible: set[int], data: st.DataObject) -> None:
    places = {place % words for place in possible}
    probabilities = torch.zeros(1, words)
    for place in places:
        probabilities[0, place] = data.draw(LEAST)
    count = numbers_per_token(words)
    numbers = data.draw(st.lists(UNIFORM, min_size=count, max_size=count))
    assert int(race(probabilities, torch.tensor([numbers], dtype=torch.float64))) in places


def test_race_adverse_numbers_draw_no_word_of_zero() -> None:
    # The possible words get the longest time of the race, all others the shortest.
    probabilities = torch.zeros(1, 100)
    probabilities[0, [37, 99]] = torch.tensor([1e-45, 1e-38])
    width = block_width(100)
    uniform = torch.full((1, numbers_per_token(100)), 1 - 2.0**-53, dtype=torch.float64)
    uniform[0, [37 // width, 99 // width]] = 0.0
    uniform[0, [-width + 37 % width, -width + 99 % width]] = 0.0
    assert int(race(probabilities, uniform)) in (37, 99)


def test_numbers_per_token_stays_near_twice_the_root() -> None:
    assert [numbers_per_token(words) for words in (1, 8192, 151_936)] == [3, 64 + 1 + 128, 296 + 1 + 512]
