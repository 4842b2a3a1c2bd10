"""A scripted engine, and a pool whose tools are functions of the test, for conversations without processes and vLLM."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from typing import Any

from grpo_ray.tools.sandbox.protocol import CallResult

Answer = CallResult | Future[CallResult] | str | None
"""Result of a request; a text is that of a successful one, and a future is settled by the test."""
HOSTILE_CALL = "<tool_call><function=a>" + "<parameter=a>" * 20 + " " * 4000 + "</tool_call>"
"""The pattern of Qwen 3.5's parameters takes a time that grows with the cube of its length: more than a minute here."""


@cache
def tool_tokenizer(name: str = "tiny-tools") -> Any:
    """Return the tokenizer of an embedded policy, without the policy. Tests must not change it."""
    from grpo_ray.models.warm_up import build_tokenizer

    tokenizer = build_tokenizer(name)
    tokenizer.name_or_path = name
    return tokenizer


def encode(text: str) -> list[int]:
    """Return the token ids of a text, in which the texts of control tokens are control tokens."""
    ids: list[int] = tool_tokenizer()(text, add_special_tokens=False)["input_ids"]
    return ids


@dataclass
class ScriptedTurn:
    """Turn of the scripted engine; `row`, `number` and `prompt` are for the test."""

    row: int
    number: int
    prompt: list[int]
    sampling: dict[str, Any]
    token_ids: list[int]
    logps: list[float | None]
    unprocessed_logps: list[float | None]


class ScriptedEngine:
    """Engine whose rows generate the texts of a script in turn.

    Args:
        scripts: (B,) texts of each row's turns; after them a row generates "stop".
        finishing: rows in the order in which they finish; those that it lacks are not announced.
        processed: True if the engine returns log-probabilities before filters and penalties.
        log: list of all events, shared with a `ScriptedPool`.
    """

    def __init__(
        self,
        scripts: Sequence[Sequence[str]],
        finishing: Sequence[int] = (),
        processed: bool = False,
        log: list[tuple[Any, ...]] | None = None,
    ):
        self.scripts, self.finishing, self.processed = scripts, finishing, processed
        self.log = [] if log is None else log
        self.turns: list[ScriptedTurn] = []
        self.rounds: list[list[int]] = []
        """Rows of each round."""

    def __call__(
        self,
        prompts: list[list[int]],
        sampling: list[dict[str, Any]],
        on_finished: Callable[[int, list[int]], None],
    ) -> list[ScriptedTurn]:
        turns = [self._turn(prompt, options) for prompt, options in zip(prompts, sampling, strict=True)]
        rows = [turn.row for turn in turns]
        self.rounds.append(rows)
        for row in self.finishing:
            if row in rows:
                self.log.append(("finished", row))
                on_finished(rows.index(row), turns[rows.index(row)].token_ids)
        self.turns += turns
        return turns

    def _turn(self, prompt: list[int], options: dict[str, Any]) -> ScriptedTurn:
        row, number = options["row"], options["turn"]
        script = self.scripts[row]
        text = script[number] if number < len(script) else "stop<|end|>"
        ids = encode(text)[: options["max_tokens"]]
        # All different, so that a log-probability on the wrong token is noticed.
        logps: list[float | None] = [-(row + 1 + number / 100 + place / 100_000) for place in range(len(ids))]
        unprocessed = [1000 * each for each in logps if each is not None] if self.processed else []
        return ScriptedTurn(row, number, list(prompt), options, ids, logps, list(unprocessed))

    def of(self, row: int) -> list[ScriptedTurn]:
        """Return a row's turns."""
        return [turn for turn in self.turns if turn.row == row]


class ScriptedPool:
    """Pool whose episodes answer at once.

    Args:
        answer: function of (row, operation, payload) that returns the result; operations are "reset", "call", "step"
            and "reward", and the payload of a call is (name, arguments).
        log: list of all events, shared with a `ScriptedEngine`.
    """

    def __init__(self, answer: Callable[[int, str, Any], Answer], log: list[tuple[Any, ...]] | None = None):
        self.answer = answer
        self.log = [] if log is None else log
        self.episodes: list[ScriptedEpisode] = []
        self.isolation: str | None = None
        self.withheld: Sequence[str] = ()

    def open(self, environment: str | None, seed: int, columns: Mapping[str, Any], call_seed: int) -> "ScriptedEpisode":
        opened = {"environment": environment, "seed": seed, "columns": dict(columns), "call_seed": call_seed}
        self.episodes.append(ScriptedEpisode(self, len(self.episodes), opened))
        return self.episodes[-1]

    def close(self) -> None:
        self.log.append(("closed",))


class ScriptedEpisode:
    """Episode of a `ScriptedPool`."""

    def __init__(self, pool: ScriptedPool, row: int, opened: dict[str, Any]):
        self.pool, self.row, self.opened = pool, row, opened
        self.requests: list[tuple[Any, ...]] = []
        self.closed = 0

    def reset(self) -> "Future[CallResult]":
        return self._request("reset")

    def call(self, name: str, arguments: Mapping[str, Any]) -> "Future[CallResult]":
        return self._request("call", (name, dict(arguments)))

    def step(self, message: str) -> "Future[CallResult]":
        return self._request("step", message)

    def reward(self) -> "Future[CallResult]":
        return self._request("reward")

    def close(self) -> None:
        self.closed += 1

    def _request(self, operation: str, payload: Any = None) -> "Future[CallResult]":
        assert not self.closed
        self.requests.append((operation, payload))
        self.pool.log.append((operation, self.row))
        answer = self.pool.answer(self.row, operation, payload)
        if isinstance(answer, Future):  # the test settles it
            return answer
        future: Future[CallResult] = Future()
        future.set_result(answer if isinstance(answer, CallResult) else CallResult("ok", answer))
        return future
