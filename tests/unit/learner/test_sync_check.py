"""Importance ratio, comparison of log-probabilities, metrics, and the check of the sync once a batch."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from grpo_ray.errors import SyncError
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.sync_check import (
    ImportanceSampling,
    SyncChecker,
    TokenLogps,
    anchor_to_behaviour,
    compare_logps,
    sampling_metrics,
    turn_gap_metrics,
)

# ImportanceSampling

LOG2 = math.log(2)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        # Ratios of the tokens are 2, 1/4 and, where the engine gave no log-probability, 1; their product is 1/2.
        ("token_truncate", [[1.5, 0.3, 1.0]]),
        ("token_mask", [[0.0, 0.0, 1.0]]),
        ("sequence_truncate", [[0.5]]),
        ("sequence_mask", [[0.5]]),
    ],
)
def test_importance_ratio_worked_example(mode: str, expected: list[list[float]]) -> None:
    gap = torch.tensor([[LOG2, -2 * LOG2, math.nan]])
    torch.testing.assert_close(ImportanceSampling(mode, 0.3, 1.5).ratio(gap), torch.tensor(expected))


@pytest.mark.parametrize("bounds", [(1.0, 2.0), (0.5, 1.0), (1.0, 1.0)])
def test_importance_ratio_at_a_bound_is_kept(bounds: tuple[float, float]) -> None:
    gap = torch.zeros(1, 2)
    for mode in ("token_mask", "sequence_mask", "token_truncate"):
        assert (ImportanceSampling(mode, *bounds).ratio(gap) == 1.0).all()


@given(
    gap=st.lists(st.floats(-5, 5), min_size=1, max_size=5),
    level=st.sampled_from(["token", "sequence"]),
    low=st.floats(0.01, 1),
    high=st.floats(1, 10),
)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_importance_ratio_stays_in_bounds(gap: list[float], level: str, low: float, high: float) -> None:
    gaps = torch.tensor([gap], dtype=torch.float64)
    truncated = ImportanceSampling(f"{level}_truncate", low, high).ratio(gaps)
    masked = ImportanceSampling(f"{level}_mask", low, high).ratio(gaps)
    assert truncated.shape == masked.shape == (1, len(gap) if level == "token" else 1)
    assert ((truncated >= low) & (truncated <= high)).all()
    kept = masked != 0
    assert (masked[kept] == truncated[kept]).all()
    assert ((truncated[~kept] == low) | (truncated[~kept] == high)).all()


def test_padding_ratio_follows_mode() -> None:
    assert ImportanceSampling("token_truncate", 0.3, 1.5).padding_ratio == 1.0
    assert ImportanceSampling("token_mask", 1.1, 1.5).padding_ratio == 0.0  # a ratio of 1 is outside of the bounds
    assert ImportanceSampling("sequence_mask", 0.3, 1.5).padding_ratio is None


# compare_logps


def batch() -> dict[str, torch.Tensor]:
    """Make a batch of two completions, of three tokens and of one."""
    return {
        "completion_mask": torch.tensor([[1, 1, 1], [1, 0, 0]]),
        "sampling_per_token_logps": torch.tensor([[-1.0, -2.0, math.nan], [-3.0, 0.0, 0.0]]),
    }


def test_compare_logps_gives_batch_its_ratio() -> None:
    compared, logps = batch(), torch.tensor([[-1.0 + LOG2, -2.0, -1.0], [-3.0, -9.0, -9.0]])
    tokens = compare_logps(compared, logps, ImportanceSampling("token_truncate", high=1.5))
    assert tokens is not None and tokens.ratios is not None
    # The ratio of the first token is 2, cut to 1.5; it is 1 where the engine gave none, and on padding.
    torch.testing.assert_close(compared["importance_sampling_ratio"], torch.tensor([[1.5, 1, 1], [1, 1, 1]]))
    assert tokens.ratios.tolist() == [1.5, 1.0, 1.0, 1.0]
    assert tokens.learner.tolist() == logps[batch()["completion_mask"].bool()].tolist()
    assert tokens.engine[2].isnan() and tokens.engine[3] == -3.0


def test_compare_logps_without_importance_sampling_leaves_batch() -> None:
    compared = batch()
    tokens = compare_logps(compared, torch.zeros(2, 3), None)
    assert tokens is not None and tokens.ratios is None and compared.keys() == batch().keys()


def test_compare_logps_without_engine_none() -> None:
    assert compare_logps({"completion_mask": torch.ones(1, 1)}, torch.zeros(1, 1), None) is None


def test_compare_logps_with_filters_ratio_and_proof_differ() -> None:
    # The filter kept half of the probability: the token was sampled with twice the policy's.
    compared = batch() | {"unprocessed_per_token_logps": batch()["sampling_per_token_logps"] - LOG2}
    logps = torch.tensor([[-1.0 - LOG2, -2.0 - LOG2, -1.0], [-3.0 - LOG2, 0.0, 0.0]])
    tokens = compare_logps(compared, logps, ImportanceSampling("token_truncate", high=3.0))
    assert tokens is not None and tokens.ratios is not None
    assert tokens.ratios.tolist() == pytest.approx([0.5, 0.5, 1.0, 0.5])
    assert (tokens.learner - tokens.proof)[[0, 1, 3]].tolist() == [0.0, 0.0, 0.0]


def tokens_of(learner: list[float], engine: list[float], ratios: list[float], proof: list[float]) -> TokenLogps:
    return TokenLogps(
        learner=torch.tensor(learner),
        engine=torch.tensor(engine),
        ratios=torch.tensor(ratios),
        proof=torch.tensor(proof),
        later=torch.zeros(len(learner), dtype=torch.bool),
    )


ONE_TOKEN = TokenLogps(torch.zeros(1), torch.zeros(1), None, torch.zeros(1), torch.tensor([False]))


# sampling_metrics


def test_sampling_metrics_worked_example() -> None:
    tokens = tokens_of([-1.0, -2.0, -3.0], [-1.5, -2.0, math.nan], [0.5, 1.5], proof=[-1.0, -2.0, -3.0])
    metrics = sampling_metrics(tokens, Workers())
    assert metrics == {
        "sampling/sampling_logp_difference/mean": 0.25,  # gaps of 0.5 and 0; the third is unknown
        "sampling/sampling_logp_difference/max": 0.5,
        "sampling/importance_sampling_ratio/min": 0.5,
        "sampling/importance_sampling_ratio/mean": 1.0,
        "sampling/importance_sampling_ratio/max": 1.5,
    }


def test_sampling_metrics_without_importance_sampling_empty() -> None:
    assert sampling_metrics(ONE_TOKEN, Workers()) == {}


# turn_gap_metrics


def test_turn_gap_metrics_worked_example() -> None:
    # Rows: two turns with a result of two tokens between them; one turn, and padding.
    compared = {
        "completion_mask": torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0]]),
        "tool_mask": torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 0, 0, 0, 0]]),
        "sampling_per_token_logps": torch.tensor(
            [[-1.0, -1.0, 0.0, 0.0, -1.0, -2.0], [-3.0, -3.0, 0.0, 0.0, 0.0, 0.0]]
        ),
    }
    logps = torch.tensor([[-1.0, -1.5, -9.0, -9.0, -3.0, -2.0], [-3.5, -3.0, -9.0, -9.0, -9.0, -9.0]])
    tokens = compare_logps(compared, logps, importance=None)
    assert tokens is not None
    assert turn_gap_metrics(tokens, Workers()) == {
        "engine/logprob_gap_first_turn": 0.25,  # gaps of 0, 0.5, 0.5 and 0
        "engine/logprob_gap_later_turns": 1.0,  # of 2 and 0
    }


def test_turn_gap_metrics_sum_over_workers_before_they_divide() -> None:
    gap, later = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([False, True, True])
    tokens = TokenLogps(gap, torch.zeros(3), None, torch.zeros(3), later)
    other = iter((1.0, 3, 0.0, 0))  # of another worker: the sum and number of gaps, in first and in later turns
    workers = Workers(count=2, gather=lambda own: torch.stack([own, torch.full_like(own, next(other))]))
    assert turn_gap_metrics(tokens, workers) == {
        "engine/logprob_gap_first_turn": 0.5,
        "engine/logprob_gap_later_turns": 2.5,
    }


def test_turn_gap_metrics_without_later_turns_has_one() -> None:
    assert turn_gap_metrics(ONE_TOKEN, Workers()) == {"engine/logprob_gap_first_turn": 0.0}


# SyncChecker


def test_sync_checker_checks_all_micro_batches_at_once() -> None:
    checked: list[tuple[list[float], list[float], list[float]]] = []

    def check(learner: torch.Tensor, engine: torch.Tensor, mask: torch.Tensor) -> None:
        checked.append((learner.tolist(), engine.tolist(), mask.tolist()))

    checker = SyncChecker(check)
    assert checker.take_observed(is_on_policy=True) is None and not checked
    checker.observe(tokens_of([-1.0], [-1.8], [0.5], proof=[-2.0]))
    checker.observe(None)
    checker.observe(tokens_of([-3.0, -4.0], [-2.8, -4.8], [1.0, 2.0], proof=[-3.0, -5.0]))
    tokens = checker.take_observed(is_on_policy=True)
    assert checked == [([-1.0, -3.0, -4.0], [-2.0, -3.0, -5.0], [1.0, 1.0, 1.0])]
    assert tokens is not None and tokens.ratios is not None and tokens.ratios.tolist() == [0.5, 1.0, 2.0]
    assert checker.take_observed(is_on_policy=True) is None and len(checked) == 1


def test_sync_checker_tokens_of_older_weights_are_returned_unchecked() -> None:
    checked: list[torch.Tensor] = []
    checker = SyncChecker(lambda learner, engine, mask: checked.append(learner))
    checker.observe(ONE_TOKEN)
    tokens = checker.take_observed(is_on_policy=False)
    assert tokens is not None and tokens.learner.tolist() == ONE_TOKEN.learner.tolist() and not checked


# Anchor


def test_anchor_to_behaviour_worked_example() -> None:
    batch = {
        "sampling_per_token_logps": torch.tensor([[-1.0, math.nan, 0.0]]),
        "importance_sampling_ratio": torch.tensor([[2.0, 1.0, 1.0]]),
    }
    anchor_to_behaviour(batch, torch.tensor([[-3.0, -4.0, -5.0]]))
    assert batch["old_per_token_logps"].tolist() == [[-1.0, -4.0, 0.0]]  # the learner's where the engine has none
    assert batch["importance_sampling_ratio"].tolist() == [[1.0, 1.0, 1.0]]


def test_anchor_to_behaviour_without_correction_adds_no_ratio() -> None:
    batch = {"sampling_per_token_logps": torch.tensor([[-1.0]])}
    anchor_to_behaviour(batch, torch.tensor([[-3.0]]))
    assert batch.keys() == {"sampling_per_token_logps", "old_per_token_logps"}


def test_sync_checker_reset_forgets_tokens() -> None:
    def check(*logps: torch.Tensor) -> None:
        raise SyncError("not in sync")

    checker = SyncChecker(check)
    checker.observe(ONE_TOKEN)
    with pytest.raises(SyncError):
        checker.take_observed(is_on_policy=True)
    checker.observe(ONE_TOKEN)
    checker.reset()
    assert checker.take_observed(is_on_policy=True) is None
