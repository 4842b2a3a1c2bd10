"""Tools against unmodified TRL's loop of tools: every parameter's gradient is the same, in float64."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from all_pairs import pairs_then_all
from stock_trl import NEAR, Record, accumulated, largest_difference
from tool_steps import TOOL_TOKENIZER, ToolEngine, ToolLearner, ToolTrainer, train_with_tools

from grpo_ray.config.trl_fields import LOSS_TYPES
from grpo_ray.inference.conversation_sampler import ConversationSampler
from grpo_ray.learner.exact_savings import SavingsPlan
from grpo_ray.learner.passes import PASS_COST

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(autouse=True)
def free_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the cost of a pass to 0, so that the short rows of these tests are split like rows of hundreds of tokens."""
    monkeypatch.setitem(PASS_COST, "cpu", 0)


def compare(folder: Path, **settings: Any) -> tuple[Record, Record]:
    stock, _ = train_with_tools(ToolTrainer, folder, **settings)
    ours, _ = train_with_tools(ToolLearner, folder, **settings)
    assert largest_difference(ours, stock) < NEAR
    assert all(log["rollout/calls_mean"] > 0 and log["rollout/result_token_share"] > 0 for log in ours.logs)
    assert {log["tools/call_frequency"] for log in stock.logs} == {log["rollout/calls_mean"] for log in ours.logs}
    return ours, stock


@pytest.mark.parametrize(("loss_type", "accumulation"), pairs_then_all(LOSS_TYPES, (1, 2)))
def test_tools_same_gradient_as_stock_loop(tmp_path: Path, loss_type: str, accumulation: int) -> None:
    ours, stock = compare(tmp_path, loss_type=loss_type, **accumulated(accumulation))
    for a, b in zip(ours.logs, stock.logs, strict=True):
        assert a["completions/mean_length"] == b["completions/mean_length"]


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_tools_same_gradient_without_savings(tmp_path: Path, loss_type: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ToolLearner, "savings", SavingsPlan())
    compare(tmp_path, loss_type=loss_type)


def test_tokens_of_results_have_no_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with a mask that counts tokens of results as the policy's own: the gradient is another one."""
    sample = ConversationSampler.sample

    def unmasked(*args: Any, **kwargs: Any) -> Any:
        return [replace(each, own=[1] * len(each.own)) for each in sample(*args, **kwargs)]

    stock, _ = train_with_tools(ToolTrainer, tmp_path)
    monkeypatch.setattr(ConversationSampler, "sample", unmasked)
    ours, _ = train_with_tools(ToolLearner, tmp_path)
    assert largest_difference(ours, stock) > 1e-3


def test_proof_of_sync_leaves_out_tokens_of_results(tmp_path: Path) -> None:
    """Log-probabilities of results are 0, which no policy gives; the proof sees only the policy's own tokens."""
    _, trainer = train_with_tools(ToolLearner, tmp_path)
    engine_logps = torch.cat([each for _, _, each in trainer.engine.proven])
    assert len(engine_logps) > 100 and (engine_logps != 0).all()


class BracketEngine(ToolEngine):
    """Engine whose first turn of each step is a call with more brackets than a parser of JSON can nest."""

    def turns(self, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[float | None]]]:
        ids: list[int] = TOOL_TOKENIZER(f"<|call|>{'[' * 1500}<|end|>", add_special_tokens=False)["input_ids"]
        return [(ids, [-5.0] * len(ids)), *super().turns(prompts[1:])]


class BracketLearner(ToolLearner):
    engine_class = BracketEngine
    overrides = (*ToolLearner.overrides, "grpo.max_completion_length=2048")


def test_deep_brackets_end_one_completion_and_not_the_run(tmp_path: Path) -> None:
    """TRL would read the whole conversation again, without an answer to RecursionError."""
    tokenizer_grammar = TOOL_TOKENIZER.response_template
    record, trainer = train_with_tools(BracketLearner, tmp_path, max_completion_length=2048)
    assert len(record.logs) == 2 and {each.ended for each in trainer.rollout.conversations} <= {"stop", "turns"}
    assert trainer.processing_class.response_template == tokenizer_grammar is not None


def test_completion_whose_environment_was_lost_has_no_reward_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards of other functions must neither punish nor praise a completion whose environment was lost."""
    sample = ConversationSampler.sample

    def lose_first(*args: Any, **kwargs: Any) -> Any:
        first, *others = sample(*args, **kwargs)
        return [replace(first, ended="tool"), *others]

    monkeypatch.setattr(ConversationSampler, "sample", lose_first)
    _, trainer = train_with_tools(ToolLearner, tmp_path)
    rewards = trainer.rollout.rewards
    assert rewards[0].isnan().all() and not rewards[1].isnan().all()
