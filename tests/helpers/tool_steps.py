"""Steps of unmodified TRL and of our learner with a tool, on turns that depend on the conversation alone.

TRL runs its own loop of tools, ours runs its own too, with tools in processes.
"""

import hashlib
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from datasets import Dataset
from stock_trl import GROUP, REWARDS, VOCABULARY, Record, ScriptedEngine, ScriptedLearner, train_steps
from trl import GRPOTrainer

from grpo_ray.inference.sampling import Completion
from grpo_ray.models.warm_up import build_tokenizer
from grpo_ray.tools.examples import multiply

TOOL_TOKENIZER = build_tokenizer("tiny-tools")
LONGEST = 96
MAX_TURNS = 3
TURNS = (
    '<|call|>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}<|end|>',
    '<|call|>{{"name": "multiply", "arguments": {{"a": {a}, "b": {b}}}}}'
    '<|call|>{{"name": "multiply", "arguments": {{"a": {b}, "b": 2}}}}<|end|>',
    '<|call|>{{"name": "divide", "arguments": {{"a": {a}}}}}<|end|>',
    "\\boxed{{{a}}}<|end|>",
    "\\boxed{{{b}}}",
)
"""Texts of turns: one call, two calls, a call of an unknown tool, an answer, and one that is cut off."""


class ToolEngine(ScriptedEngine):
    """Engine whose turns depend on the context, and on how many same ones come before it in the call."""

    max_model_len = 4096
    vocabulary_size = VOCABULARY

    def __init__(self, seed: int, longest: int) -> None:
        super().__init__(seed, longest)
        model_config = SimpleNamespace(max_model_len=self.max_model_len)
        self.llm = SimpleNamespace(llm_engine=SimpleNamespace(model_config=model_config))  # where TRL looks for it

    def turns(self, prompts: Sequence[Sequence[int]]) -> list[tuple[list[int], list[float | None]]]:
        """Return tokens and log-probabilities of a turn for each prompt."""
        seen: Counter[tuple[int, ...]] = Counter()
        turns: list[tuple[list[int], list[float | None]]] = []
        for prompt in prompts:
            context = tuple(prompt)
            seen[context] += 1
            digest = hashlib.blake2b(repr((context, seen[context])).encode(), digest_size=8).digest()
            rng = random.Random(digest)
            text = rng.choice(TURNS).format(a=rng.randint(2, 99), b=rng.randint(2, 99))
            ids: list[int] = TOOL_TOKENIZER(text, add_special_tokens=False)["input_ids"]
            turns.append((ids, [-math.log(VOCABULARY) + rng.gauss(0, 0.4) for _ in ids]))
        return turns

    def generate(self, prompts: list[list[int]], **kwargs: Any) -> tuple[Any, ...]:
        turns = self.turns(prompts)
        return prompts, [ids for ids, _ in turns], [[[logp] for logp in logps] for _, logps in turns], None

    @contextmanager
    def rounds(self) -> Iterator[Callable[..., list[Completion]]]:
        yield self._run_round

    def _run_round(
        self, prompts: Sequence[Sequence[int]], sampling: Sequence[dict[str, Any]], on_finished: Callable[..., None]
    ) -> list[Completion]:
        completions = []
        for index, ((ids, logps), arguments) in enumerate(zip(self.turns(prompts), sampling, strict=True)):
            limit = arguments["max_tokens"]
            completions.append(Completion(ids[:limit], len(ids) > limit, logps[:limit], []))
            on_finished(index, ids[:limit])
        return completions

    def is_any_active(self, is_active: bool) -> bool:
        return is_active


class ToolTrainer(GRPOTrainer):
    """Unmodified TRL with its own loop of tools."""

    engine_class = ToolEngine


class ToolLearner(ScriptedLearner):
    """Our learner with the same tool."""

    engine_class = ToolEngine
    overrides: Sequence[str] = (
        "model.path=tiny-tools",
        "rollout.tools=['grpo_ray.tools.examples:multiply']",
        f"rollout.max_turns={MAX_TURNS}",
        f"grpo.max_completion_length={LONGEST}",
        "grpo.vllm_importance_sampling_mode=token_truncate",
    )


def tool_problems() -> Dataset:
    """Return problems whose prompts are chats, with the rewards of each group."""
    rows = []
    for n in range(32):
        prompt = [{"role": "user", "content": f"What is {10 + n} * {20 + n}?"}]
        pays = REWARDS[n % len(REWARDS)]
        rows.append({"prompt": prompt, "pays": pays, "id": f"{n:016x}", "epoch": 0, "index": 0, "solution": ""})
    return Dataset.from_list(rows)


def train_with_tools(kind: type[GRPOTrainer], folder: Path, **settings: Any) -> tuple[Record, Any]:
    """Train two steps with the tool; see `train_steps`."""
    arguments: dict[str, Any] = {}
    if kind is ToolTrainer:
        arguments["tools"] = [multiply]
        settings["max_tool_calling_iterations"] = MAX_TURNS - 1
    defaults: dict[str, Any] = {"max_completion_length": LONGEST, "vllm_importance_sampling_mode": "token_truncate"}
    record, trainer = train_steps(
        kind, folder, tokenizer=TOOL_TOKENIZER, dataset=tool_problems(), arguments=arguments, **(defaults | settings)
    )
    if isinstance(trainer, ToolLearner):
        trainer.end_tools()  # the processes of the tools
    return record, trainer


__all__ = ["GROUP", "ToolEngine", "ToolLearner", "ToolTrainer", "train_with_tools"]
