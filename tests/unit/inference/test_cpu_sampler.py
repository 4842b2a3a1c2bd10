"""Tests of sampling from probabilities: frequencies, independence of the batch, and tokens of probability zero."""

from collections.abc import Iterator

import pytest
import torch
from chi_square import p_value, seeded_generators
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from grpo_ray.inference.cpu_sampler import block_race, block_width, sample_tokens, uniforms_per_sample

pytestmark = pytest.mark.usefixtures("one_thread")


def zipf(vocabulary_size: int) -> torch.Tensor:
    """Return probabilities inversely proportional to the rank, ranks in random order: (V,) float32."""
    ranks = torch.randperm(vocabulary_size, generator=torch.Generator().manual_seed(vocabulary_size))
    weights = 1.0 / (1 + ranks.double())
    return (weights / weights.sum()).float()


def count_tokens(probabilities: torch.Tensor, samples: Iterator[torch.Tensor]) -> torch.Tensor:
    """Return how often each token was sampled: (V,) int64."""
    return sum(torch.bincount(tokens, minlength=len(probabilities)) for tokens in samples)


DISTRIBUTIONS = {
    "one token": torch.ones(1),
    "two tokens": torch.tensor([0.3, 0.7]),
    "some zeros": torch.tensor([0.0, 0.1, 0.0, 0.2, 0.0, 0.0, 0.7, 0.0, 0.0]),
    "uniform, full blocks": torch.full((1024,), 1 / 1024),
    "uniform, with remainder": torch.full((1000,), 1 / 1000),
    "remainder only": torch.tensor([0.0] * 16 + [0.25, 0.75]),
    "zipf": zipf(8192),
    "zipf, with remainder": zipf(5003),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_sample_tokens_frequencies_match_probabilities(name: str) -> None:
    probabilities = DISTRIBUTIONS[name]
    rows = 500
    batch = probabilities.repeat(rows, 1)
    counts = count_tokens(
        probabilities, (sample_tokens(batch, seeded_generators(rows, first)) for first in range(0, 20_000, rows))
    )
    assert p_value(counts, probabilities) > 1e-3


def test_sample_tokens_reused_generator_matches_probabilities() -> None:
    probabilities = zipf(50)
    # One generator shared by all rows draws for one sample after the other, without 20,000 calls.
    generator = torch.Generator().manual_seed(0)
    batch, generators = probabilities.repeat(500, 1), dict.fromkeys(range(500), generator)
    samples = [sample_tokens(batch, generators) for _ in range(40)]
    assert p_value(count_tokens(probabilities, iter(samples)), probabilities) > 1e-3
    alone = seeded_generators(1)
    assert [int(sample_tokens(probabilities[None], alone)) for _ in range(100)] == samples[0][:100].tolist()


def test_sample_tokens_consecutive_tokens_are_independent() -> None:
    probabilities = zipf(10)
    batch = probabilities.repeat(500, 1)
    pairs = (
        sample_tokens(batch, generators) * 10 + sample_tokens(batch, generators)
        for generators in (seeded_generators(500, first) for first in range(0, 20_000, 500))
    )
    both = (probabilities[:, None] * probabilities).flatten()
    assert p_value(count_tokens(both, pairs), both) > 1e-3


def test_sample_tokens_unseeded_frequencies_match_probabilities() -> None:
    probabilities = zipf(100)
    torch.manual_seed(0)
    counts = count_tokens(
        probabilities, (sample_tokens(probabilities.repeat(501, 1), seeded_generators(1)) for _ in range(40))
    )
    # The row with a seed samples the same token each time.
    counts[sample_tokens(probabilities[None], seeded_generators(1))] -= 40
    assert p_value(counts, probabilities) > 1e-3


def test_p_value_five_percent_off_is_rejected() -> None:
    probabilities = zipf(100)
    wrong = probabilities.clone()
    wrong[::2] *= 1.05
    wrong /= wrong.sum()
    counts = count_tokens(
        probabilities,
        (sample_tokens(wrong.repeat(500, 1), seeded_generators(500, first)) for first in range(0, 100_000, 500)),
    )
    assert p_value(counts, probabilities) < 1e-6 and p_value(counts, wrong) > 1e-3


@pytest.mark.parametrize("vocabulary_size", [30, 8192, 32_003])
def test_sample_tokens_alone_equals_any_batch(vocabulary_size: int) -> None:
    logits = torch.randn(24, vocabulary_size, generator=torch.Generator().manual_seed(0)) * 3
    probabilities = logits.softmax(-1)
    batch = sample_tokens(probabilities, seeded_generators(24)).tolist()
    assert len(set(batch)) > 1
    alone = [int(sample_tokens(probabilities[row : row + 1], {0: seeded_generators(24)[row]})) for row in range(24)]
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1)).tolist()
    generators = dict(reversed([(position, seeded_generators(24)[row]) for position, row in enumerate(order)]))
    shuffled = sample_tokens(probabilities[order], generators).tolist()
    beside_unseeded = sample_tokens(probabilities.repeat(2, 1), seeded_generators(24))[:24].tolist()
    assert alone == batch
    assert shuffled == [batch[row] for row in order]
    assert beside_unseeded == batch


def test_sample_tokens_rounding_changes_fewer_than_a_search() -> None:
    # A search in cumulative probabilities fails here: a change of one token moves the bounds of all tokens behind it.
    generator = torch.Generator().manual_seed(0)
    changed = changed_by_search = 0
    for first in range(0, 4000, 200):
        logits = torch.randn(200, 8192, generator=generator) * 2
        logits[:, :8] += 8
        rounded = (logits + 1e-4 * torch.randn(200, 8192, generator=generator)).softmax(-1)
        exact = logits.softmax(-1)
        pair = [sample_tokens(each, seeded_generators(200, first)) for each in (exact, rounded)]
        changed += int((pair[0] != pair[1]).sum())
        u = torch.rand(200, 1, generator=generator, dtype=torch.float64)
        pair = [torch.searchsorted(each.cumsum(-1, dtype=torch.float64), u) for each in (exact, rounded)]
        changed_by_search += int((pair[0] != pair[1]).sum())
    assert changed <= 5 < changed_by_search


UNIFORM = st.floats(0.0, 1.0, exclude_max=True)  # the maximum is 1 - 2**-53
TINY = st.sampled_from([1.0, 1e-30, 1e-45])  # the last is a subnormal number


@given(vocabulary_size=st.integers(1, 200), probability=TINY, block=UNIFORM, inside=UNIFORM)
@example(vocabulary_size=1000, probability=1e-45, block=0.0, inside=1 - 2.0**-53)
@example(vocabulary_size=1000, probability=1e-45, block=1 - 2.0**-53, inside=0.0)
@example(vocabulary_size=1, probability=1e-45, block=1 - 2.0**-53, inside=1 - 2.0**-53)
@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_block_race_only_possible_token_always_wins(
    vocabulary_size: int, probability: float, block: float, inside: float
) -> None:
    count = uniforms_per_sample(vocabulary_size)
    probabilities = torch.zeros(vocabulary_size, vocabulary_size).fill_diagonal_(probability)
    uniform = torch.full((vocabulary_size, count), block, dtype=torch.float64)
    uniform[:, count - block_width(vocabulary_size) :] = inside
    assert block_race(probabilities, uniform).tolist() == list(range(vocabulary_size))


@given(
    vocabulary_size=st.integers(2, 120), possible=st.sets(st.integers(0, 119), min_size=1, max_size=3), data=st.data()
)
@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_block_race_any_uniforms_select_a_possible_token(
    vocabulary_size: int, possible: set[int], data: st.DataObject
) -> None:
    tokens = {token % vocabulary_size for token in possible}
    probabilities = torch.zeros(1, vocabulary_size)
    for token in tokens:
        probabilities[0, token] = data.draw(TINY)
    count = uniforms_per_sample(vocabulary_size)
    uniform = data.draw(st.lists(UNIFORM, min_size=count, max_size=count))
    assert int(block_race(probabilities, torch.tensor([uniform], dtype=torch.float64))) in tokens


def test_block_race_adverse_uniforms_select_no_zero_token() -> None:
    # The possible tokens get the latest arrival time, all others the earliest.
    probabilities = torch.zeros(1, 100)
    probabilities[0, [37, 99]] = torch.tensor([1e-45, 1e-38])
    width = block_width(100)
    uniform = torch.full((1, uniforms_per_sample(100)), 1 - 2.0**-53, dtype=torch.float64)
    uniform[0, [37 // width, 99 // width]] = 0.0
    uniform[0, [-width + 37 % width, -width + 99 % width]] = 0.0
    assert int(block_race(probabilities, uniform)) in (37, 99)


def test_uniforms_per_sample_is_near_twice_the_square_root() -> None:
    assert [uniforms_per_sample(size) for size in (1, 8192, 151_936)] == [3, 64 + 1 + 128, 296 + 1 + 512]
