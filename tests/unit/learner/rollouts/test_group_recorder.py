"""Records of a step's groups, made without a trainer."""

import math
from array import array
from dataclasses import replace

import torch

from grpo_ray.learner.batch import SAMPLED_ROWS
from grpo_ray.learner.rollouts.group_recorder import GroupRecorder, find_truncated
from grpo_ray.learner.rollouts.rollout import Rollout
from grpo_ray.storage.records.tokens import COMPLETION_TOKENS
from grpo_ray.tools.conversation import CallRecord, Conversation

END, PAD = 1, 0


class LetterTokenizer:
    """Tokenizer whose token n is the n-th letter; end and padding are special."""

    def batch_decode(self, completions: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        special = {END, PAD} if skip_special_tokens else set()
        return ["".join(chr(96 + int(token)) for token in ids if int(token) not in special) for ids in completions]


def recorder(names: tuple[str, ...] = ("correctness", "style")) -> GroupRecorder:
    return GroupRecorder(2, names, torch.tensor([1.0, 0.5]), LetterTokenizer(), {END, PAD})


def two_groups(marks: tuple[int, ...] = (0, 1, -1, -1)) -> Rollout:
    """Make two groups of two completions, of problems a and b in epochs 0 and 1; the last completion is masked."""
    inputs = [
        {"id": name, "epoch": epoch, "prompt": [{"role": "user", "content": f"solve {name}"}]}
        for epoch, name in enumerate("ab")
        for _ in range(2)
    ]
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [math.nan, 1.0], [math.nan, math.nan]])
    output = {
        "completion_ids": torch.tensor([[5, END], [6, 7], [8, END], [9, 9]]),
        "completion_mask": torch.tensor([[1, 1]] * 3 + [[0, 0]]),
        "advantages": torch.tensor([1.0, -1.0, 0.0, math.nan]),
        "sampling_per_token_logps": torch.tensor([[-0.25, -1.0], [-0.5, -0.75], [0.0, 0.0], [-2.0, -3.0]]),
        SAMPLED_ROWS: torch.tensor(marks),
    }
    return Rollout(inputs, [[5, END], [6, 7], [8, END], [9, 9]], rewards, output)


def test_find_truncated_completion_without_end_true() -> None:
    assert find_truncated([[5, END], [5, 6], [5, PAD], []], {END, PAD}) == [False, True, False, True]


def test_find_truncated_rollout_function_reports_it_itself() -> None:
    def conversation(truncated: bool | None) -> Conversation:
        return Conversation([1], [5], [0.0], None, [1], [], None, "stop", 1, [], truncated=truncated)

    reported = [conversation(each) for each in (True, False, None)]
    assert find_truncated([[5, END], [5, 6], [5, 6]], {END, PAD}, reported) == [True, False, True]


def test_records_worked_example() -> None:
    first, second = recorder().records(two_groups(), step=3)
    assert (first.step, first.epoch, first.problem) == (3, 0, "a") and (second.epoch, second.problem) == (1, "b")
    assert first.rewards == (1.0, 0.5) and first.correct == (1.0, 0.0)
    assert second.rewards[0] == 0.5 and math.isnan(second.rewards[1])  # the second function alone, then none
    assert first.lengths == (2, 2) and first.truncated == (False, True)
    assert first.prompt == "solve a" and first.completions == ("e", "fg")
    assert (first.sample, first.advantages) == ("first", (1.0, -1.0))
    assert (second.completions, second.sample, second.advantages, second.tokens) == (None,) * 4


def test_records_tokens_worked_example() -> None:
    rows = two_groups((0, 1, 2, 3))
    rows.batch["sampling_per_token_logps"][1, 1] = math.nan  # the engine returned none
    first, second = recorder().records(rows, step=3)
    one, two = first.tokens or ()
    assert (one.texts, two.texts) == (["e", ""], ["f", "g"])  # the end token has no text
    assert one.engine_logps == array("f", [-0.25, -1.0]) and one.learner_logps is None
    assert two.engine_logps[0] == -0.5 and math.isnan(two.engine_logps[1])
    assert (one.masked, one.head, one.results, first.conversations) == (b"\0\0", 2, None, None)
    assert second.sample == "signal" and second.tokens is not None and second.tokens[1].masked == b"\1\1"


def conversation(own: list[int]) -> Conversation:
    """Make a conversation with a failed call and an answer; `own` is (T,), 0 on tokens of results."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    return Conversation(
        prompt_ids=[2],
        token_ids=[5] * len(own),
        logps=[-1.0] * len(own),
        unprocessed_logps=None,
        own=own,
        messages=[
            {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [call]},
            {"role": "tool", "name": "add", "content": "{'error': 'timeout'}"},
            {"role": "assistant", "content": "2"},
        ],
        reward=None,
        ended="stop",
        turns=2,
        calls=[CallRecord("add", "timeout", 0.25, 1)],
    )


def test_records_conversations_worked_example() -> None:
    rows = replace(two_groups(), conversations=[conversation([1, 0]), *[conversation([1, 1])] * 3])
    first, second = recorder().records(rows, step=3)
    assert first.conversations is not None and second.conversations is not None
    one = first.conversations[0]
    assert (one.turns, one.calls, one.call_errors, one.tool_seconds, one.ended) == (2, 1, 1, 0.25, "stop")
    assert [(part.role, part.name, part.content) for part in one.messages or ()] == [
        ("reasoning", "", "hm"), ("call", "add", '{"a": 1}'), ("tool", "add", "{'error': 'timeout'}"),
        ("assistant", "", "2"),
    ]  # fmt: skip
    assert [each.results for each in first.tokens or ()] == [b"\0\1", b"\0\0"]
    assert second.conversations[0] == replace(one, messages=None) and second.tokens is None  # not a sample


def test_records_long_completion_keeps_both_ends() -> None:
    rows = two_groups()
    rows.token_ids[0] = list(range(2, 27)) * 20  # 500 tokens
    length = 500
    rows.batch["completion_mask"] = torch.ones(4, length, dtype=torch.long)
    rows.batch["sampling_per_token_logps"] = -torch.arange(length).float().repeat(4, 1)
    (tokens, _) = recorder().records(rows, 1)[0].tokens or ()
    letters = "".join(chr(96 + token) for token in rows.token_ids[0])
    assert (len(tokens.ends), tokens.head) == (COMPLETION_TOKENS, 171)
    assert "".join(tokens.texts) == letters[:171] + letters[-85:]
    assert (tokens.engine_logps[170], tokens.engine_logps[171]) == (-170.0, -415.0)


def test_records_without_marks_has_no_texts() -> None:
    rows = two_groups()
    del rows.batch[SAMPLED_ROWS]
    assert all(group.prompt is None and group.tokens is None for group in recorder().records(rows, 1))


def test_records_without_correctness_reward_unknown() -> None:
    assert all(group.correct is None for group in recorder(("length", "style")).records(two_groups(), 1))


def test_study_names_groups_with_non_finite_numbers() -> None:
    studied = recorder().study(two_groups(), 1)
    assert [group["finite"] for group in studied] == [True, False]
    assert [group["problem"] for group in studied] == ["a", "b"]
    assert studied[0]["advantages"] == [1.0, -1.0] and studied[0]["completions"] == ["ea", "fg"]
