"""An engine without vLLM whose completions depend on the prompt and the seed of a request alone."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from scripted_tools import tool_tokenizer

from grpo_ray.inference.sampling import Completion, ignore_finished

NAME = "tiny-arithmetic"
"""Policy whose tokens the engine writes."""
END = tool_tokenizer(NAME).eos_token_id


@dataclass
class SeededEngine:
    """Engine whose completions depend on prompt and seed alone."""

    calls: list[tuple[list[list[int]], list[dict[str, Any]]]] = field(default_factory=list)
    processed: bool = False
    longest: int = 7
    missing: bool = False
    training_sampling: dict[str, Any] = field(default_factory=lambda: {"max_tokens": 24, "logprobs": 0})

    def __call__(
        self, prompts: list[list[int]], sampling: list[dict[str, Any]], on_finished: Callable[..., None]
    ) -> list[Completion]:
        self.calls.append((prompts, sampling))
        return [self.complete(prompt, options) for prompt, options in zip(prompts, sampling, strict=True)]

    def complete(self, prompt: list[int], options: dict[str, Any]) -> Completion:
        mixed = (options["seed"] + sum(prompt)) % 9973
        ids = [10 + (mixed + place) % 50 for place in range(2 + mixed % self.longest)] + [END]
        cut = len(ids) > options["max_tokens"]
        ids = ids[: options["max_tokens"]]
        logps: list[float | None] = [
            None if self.missing else -(mixed % 7) / 7 - place / 100 for place in range(len(ids))
        ]
        if "logprobs" not in options:
            logps = []
        return Completion(ids, cut, logps, [-9.0 for _ in ids] if self.processed else [])

    @property
    def requests(self) -> list[dict[str, Any]]:
        return [each for _, sampling in self.calls for each in sampling]

    def run_requests(
        self,
        prompts: list[list[int]],
        sampling: list[dict[str, Any]],
        on_finished: Callable[[int, list[int]], None] = ignore_finished,
    ) -> list[Completion]:
        return self(prompts, sampling, on_finished)

    @contextmanager
    def rounds(self) -> Iterator[Callable[..., list[Completion]]]:
        yield self

    def is_any_active(self, is_active: bool) -> bool:
        return is_active
