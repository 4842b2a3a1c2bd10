"""Conversations with tools that go wrong in real processes: every other completion is the same, token for token."""

import json
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import hostile_tools
import pytest
import tool_spies
from tool_steps import TOOL_TOKENIZER, ToolEngine

from grpo_ray.config.loader import load_config
from grpo_ray.inference.conversation_sampler import ConversationSampler, ignore_ended
from grpo_ray.inference.sampling import Completion
from grpo_ray.tools.conversation import Conversation

ROWS = [
    {"id": f"{n:016x}", "epoch": 0, "index": 0, "prompt": [{"role": "user", "content": f"What is {10 + n} * 7?"}]}
    for n in range(48)
]


class Engine(ToolEngine):
    """The scripted engine, whose context is that of the sampler."""

    def sample(self, sampler: ConversationSampler) -> list[Conversation]:
        with self.rounds() as run_round:
            return sampler.sample(ROWS, {}, run_round)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    helpers = str(Path(hostile_tools.__file__).parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([helpers, os.environ.get("PYTHONPATH", "")]))


@pytest.fixture
def samplers() -> Iterator[dict[str, ConversationSampler]]:
    """A sampler with the right tool, and one whose tool goes wrong for some arguments."""
    made: dict[str, ConversationSampler] = {}
    for name, path in (("sane", "grpo_ray.tools.examples:multiply"), ("wrong", "tool_spies:multiply")):
        overrides = [f"rollout.tools=['{path}']", "rollout.max_turns=3", "grpo.max_completion_length=400"]
        made[name] = ConversationSampler(load_config(None, [*overrides, "rollout.time_limit=2"]), TOOL_TOKENIZER)
    yield made
    for sampler in made.values():
        sampler.close()


def test_other_completions_are_unchanged_token_for_token(samplers: dict[str, ConversationSampler]) -> None:
    engine = Engine(0, 0)
    sane, wrong = engine.sample(samplers["sane"]), engine.sample(samplers["wrong"])
    statuses = {call.status for each in wrong for call in each.calls}
    assert statuses >= {"ok", "timeout", "processes", "crash", "memory", "unknown"}
    unspoilt = 0
    for whole, other in zip(sane, wrong, strict=True):
        if all(call.status in ("ok", "unknown") for call in other.calls) and whole.messages == other.messages:
            assert (whole.token_ids, whole.logps, whole.own) == (other.token_ids, other.logps, other.own)
            unspoilt += 1
    changed = [other for whole, other in zip(sane, wrong, strict=True) if whole.messages != other.messages]
    assert unspoilt >= 10 and len(changed) >= 10
    assert all(any(map(goes_wrong, each.messages)) for each in changed)


def goes_wrong(message: dict[str, Any]) -> bool:
    """Return True if a turn calls the tool with a factor for which it goes wrong."""
    calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    return any(call["a"] % tool_spies.MODULUS < len(tool_spies.KINDS) for call in calls)


def test_sampling_twice_is_the_same(samplers: dict[str, ConversationSampler]) -> None:
    def plain(conversation: Conversation) -> Any:
        return replace(conversation, calls=[replace(call, seconds=0.0) for call in conversation.calls])

    engine = Engine(0, 0)
    first, second = ([plain(each) for each in engine.sample(samplers["sane"])] for _ in range(2))
    assert first == second


def test_conversation_goes_on_after_a_restart_although_a_call_has_timed_out(
    samplers: dict[str, ConversationSampler],
) -> None:
    """The process of a call that times out ends, and requests that wait behind it are skipped."""
    sampler = samplers["wrong"]
    before = sampler.begin(ROWS[0], {})
    before.open(sampler.pool)
    answers = []
    for turn, a in enumerate((hang := tool_spies.MODULUS, hang - 1), start=1):
        before.turns = turn
        answers.append(before.send("call", "multiply", {"a": a, "b": 2}).result())
    assert [each.status for each in answers] == ["timeout", "ok"]
    restored = sampler.begin(ROWS[0], {})
    restored.restore(json.loads(json.dumps(before.state())), [], [], [], [])
    ids = TOOL_TOKENIZER("It is 16.<|end|>", add_special_tokens=False)["input_ids"]
    loop = sampler.turn_loop(
        lambda prompts, sampling, on_finished: [Completion(ids, False, [0.0] * len(ids), [])],
        is_any_active=bool,
        on_ended=ignore_ended,
        on_result=lambda: None,
    )
    loop.take_turns([restored], [3])
    before.close()
    assert restored.turns == 3 and restored.ended == "stop" and not restored.has_begun_anew
