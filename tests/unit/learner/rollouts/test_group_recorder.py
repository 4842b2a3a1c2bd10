"""Records of a step's groups, made without a trainer."""

import math

import pytest
import torch

from grpo_ray.learner.batch import CompletionRows
from grpo_ray.learner.rollouts.group_recorder import GroupRecorder, find_truncated

END, PAD = 1, 0


class LetterTokenizer:
    """Tokenizer whose token n is the n-th letter; end and padding are special."""

    def batch_decode(self, completions: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        special = {END, PAD} if skip_special_tokens else set()
        return ["".join(chr(96 + int(token)) for token in ids if int(token) not in special) for ids in completions]


def recorder(names: tuple[str, ...] = ("correctness", "style"), keeps_texts: bool = True) -> GroupRecorder:
    return GroupRecorder(2, names, torch.tensor([1.0, 0.5]), LetterTokenizer(), {END, PAD}, keeps_texts)  # type: ignore[arg-type]


def two_groups() -> CompletionRows:
    """Make two groups of two completions, of problems a and b in epochs 0 and 1."""
    inputs = [
        {"id": name, "epoch": epoch, "prompt": [{"role": "user", "content": f"solve {name}"}]}
        for epoch, name in enumerate("ab")
        for _ in range(2)
    ]
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [math.nan, 1.0], [math.nan, math.nan]])
    output = {
        "completion_ids": torch.tensor([[5, END], [6, 7], [8, END], [9, 9]]),
        "advantages": torch.tensor([1.0, -1.0, 0.0, math.nan]),
        "sampling_per_token_logps": torch.zeros(4, 2),
    }
    return CompletionRows(inputs, [[5, END], [6, 7], [8, END], [9, 9]], rewards, output)


def test_find_truncated_completion_without_end_true() -> None:
    assert find_truncated([[5, END], [5, 6], [5, PAD], []], {END, PAD}) == [False, True, False, True]


def test_records_worked_example() -> None:
    first, second = recorder().records(two_groups(), step=3)
    assert (first.step, first.epoch, first.problem) == (3, 0, "a") and (second.epoch, second.problem) == (1, "b")
    assert first.rewards == (1.0, 0.5) and first.correct == (1.0, 0.0)
    assert second.rewards[0] == 0.5 and math.isnan(second.rewards[1])  # the second function alone, then none
    assert first.lengths == (2, 2) and first.truncated == (False, True)
    assert first.prompt == "solve a" and first.completions == ("e", "fg")
    assert second.completions is None  # texts of the step's first group only


@pytest.mark.parametrize(("keeps_texts", "texts"), [(False, True), (True, False)])
def test_records_texts_not_wanted_left_out(keeps_texts: bool, texts: bool) -> None:
    first, _ = recorder(keeps_texts=keeps_texts).records(two_groups(), 1, texts)
    assert first.prompt is None and first.completions is None


def test_records_without_correctness_reward_unknown() -> None:
    assert all(group.correct is None for group in recorder(("length", "style")).records(two_groups(), 1))


def test_study_names_groups_with_non_finite_numbers() -> None:
    studied = recorder().study(two_groups(), 1)
    assert [group["finite"] for group in studied] == [True, False]
    assert [group["problem"] for group in studied] == ["a", "b"]
    assert studied[0]["advantages"] == [1.0, -1.0] and studied[0]["completions"] == ["ea", "fg"]
