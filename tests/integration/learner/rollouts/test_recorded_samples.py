"""Samples of steps as the real learner records them: log-probabilities of all tokens read, and what the loss masks."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stale_learners import StaleLearner
from stock_trl import EQUAL, PARTLY, SIGNAL, ScriptedLearner, accumulated, train_steps

from grpo_ray.storage.records.groups import GroupRecord, add_loss_tokens
from grpo_ray.storage.records.tokens import LossTokens, TokenRecord

pytestmark = pytest.mark.usefixtures("one_thread")

REWARDS = (EQUAL, SIGNAL, PARTLY, SIGNAL)
"""Rewards of a step's groups: the first one is without signal, the second one is the sample with signal."""


def record(folder: Path, kind: type = ScriptedLearner, **settings: Any) -> list[GroupRecord]:
    """Train two steps of 16 completions, and return the samples, two of each step."""
    groups: list[GroupRecord] = []
    tokens: list[LossTokens] = []

    def make_recording(*args: Any, **kwargs: Any) -> Any:
        learner = kind(*args, **kwargs)
        learner.hooks = replace(learner.hooks, record_groups=groups.extend, record_tokens=tokens.extend)
        return learner

    train_steps(make_recording, folder, rewards=REWARDS, **(accumulated(2) | settings))  # type: ignore[arg-type]
    return [group for group in add_loss_tokens(groups, tokens) if group.sample]


def read_tokens(samples: list[GroupRecord]) -> list[tuple[float, TokenRecord]]:
    """Return advantage and tokens of all completions of samples with signal."""
    with_signal = [group for group in samples if group.sample == "signal"]
    return [pair for group in with_signal for pair in zip(group.advantages or (), group.tokens or (), strict=True)]


def ratios(tokens: TokenRecord) -> list[float]:
    """Return the importance ratio of each token; 1 where the engine returned no log-probability, as TRL takes it."""
    assert tokens.learner_logps is not None
    gaps = [ours - theirs for ours, theirs in zip(tokens.learner_logps, tokens.engine_logps, strict=True)]
    return [1.0 if math.isnan(gap) else math.exp(gap) for gap in gaps]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"loss_type": "bnpo"},
        {"num_iterations": 2, "max_steps": 4},
        {"vllm_importance_sampling_correction": False},
        # Steps of one group: the sample with signal is in the second of four steps on a batch.
        {"per_device_train_batch_size": 4, **accumulated(1, 4), "max_steps": 8},
    ],
    ids=str,
)
def test_samples_have_logps_of_all_completions_with_gradient(tmp_path: Path, settings: dict[str, Any]) -> None:
    samples = record(tmp_path, vllm_importance_sampling_mode="token_truncate", **settings)
    steps = {group.step for group in samples}
    assert [group.sample for group in samples] == ["first", "signal"] * 2 and len(steps) == 2
    for advantage, tokens in read_tokens(samples):
        assert advantage != 0 and tokens.learner_logps is not None
        assert len(tokens.texts) == len(tokens.learner_logps) == len(tokens.engine_logps) == len(tokens.masked) > 0
        assert all(math.isfinite(each) and each < 0 for each in tokens.learner_logps)
    for group in samples:
        assert ["".join(each.texts) for each in group.tokens or ()] == list(group.completions or ())
        assert group.advantages is not None and any(group.advantages) == (group.sample == "signal")


def test_samples_logps_are_the_same_with_and_without_savings(tmp_path: Path) -> None:
    class Plain(ScriptedLearner):
        overrides = ("grpo.exact_savings=false",)

    ours, plain = (read_tokens(record(tmp_path, kind, max_steps=1)) for kind in (ScriptedLearner, Plain))
    assert len(ours) == len(plain) == 4
    for (advantage, tokens), (_, theirs) in zip(ours, plain, strict=True):
        assert advantage and tokens.texts == theirs.texts and tokens.masked == theirs.masked
        assert list(tokens.learner_logps or ()) == pytest.approx(list(theirs.learner_logps or ()), abs=2e-4)


def test_samples_masked_tokens_are_those_outside_the_bounds(tmp_path: Path) -> None:
    bounds: dict[str, Any] = {"vllm_importance_sampling_clip_min": 0.8, "vllm_importance_sampling_clip_max": 1.25}
    samples = record(tmp_path, vllm_importance_sampling_mode="token_mask", **bounds)
    seen = set()
    for _, tokens in read_tokens(samples):
        for ratio, masked in zip(ratios(tokens), tokens.masked, strict=True):
            if min(abs(ratio - 0.8), abs(ratio - 1.25)) > 1e-3:  # the recorded numbers are rounded
                assert bool(masked) == (not 0.8 < ratio < 1.25)
                seen.add(masked)
    assert seen == {0, 1}


def test_samples_truncated_completions_are_masked_as_a_whole(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"mask_truncated_completions": True, "vllm_importance_sampling_mode": "token_truncate"}
    samples = [group for group in record(tmp_path, **settings) if group.sample == "signal"]
    flags = [flag for group in samples for flag in group.truncated]
    tokens = [each for group in samples for each in group.tokens or ()]
    assert len(set(flags)) == 2
    for flag, each in zip(flags, tokens, strict=True):
        assert all(each.masked) if flag else not all(each.masked)
        assert (each.learner_logps is None) == flag


def test_samples_clipped_tokens_are_masked(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"num_iterations": 2, "max_steps": 2, "epsilon": 1e-6}
    settings["vllm_importance_sampling_mode"] = "token_truncate"
    samples = read_tokens(record(tmp_path, **settings))
    # The policy has moved before the second iteration, so that nearly all ratios are clipped on one of the two sides.
    shares = [sum(tokens.masked) / len(tokens.masked) for _, tokens in samples]
    assert len(shares) == 4 and 0.2 < sum(shares) / len(shares) < 0.8


def test_samples_of_older_weights_have_logps_of_the_weights_trained_on(tmp_path: Path) -> None:
    samples = record(tmp_path, StaleLearner, max_steps=3, vllm_importance_sampling_mode="token_truncate")
    assert [(group.step, group.sample) for group in samples] == [
        (step, sample) for step in (1, 2, 3) for sample in ("first", "signal")
    ]
    plain = record(tmp_path, max_steps=3, vllm_importance_sampling_mode="token_truncate")
    for group, expected in zip(samples, plain, strict=True):  # the scripted completions are the same at any time
        assert group.tokens and expected.tokens
        for mine, theirs in zip(group.tokens, expected.tokens, strict=True):
            assert mine.learner_logps == theirs.learner_logps  # None without a gradient: the loss did not read it
            assert (mine.learner_logps is None) == (group.sample == "first")
