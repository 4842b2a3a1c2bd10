"""Conversations: completions of several turns, and the processes in which their tools run."""

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from grpo_ray.tools.sandbox.protocol import CallResult
from grpo_ray.tools.template import Message

OK = "ok"
UNREACHABLE = "unreachable"
RETURNED = (OK, "error", "unknown", "unparsed", "skipped")
"""Statuses of calls after which the episode's process still runs."""


Ended = Literal["stop", "done", "turns", "length", "tool", "reset"]
"""Reason for the end of a completion.

- stop: the policy called no tool.
- done: the environment was done.
- turns: `rollout.max_turns`.
- length: `grpo.max_completion_length` or the engine's context.
- tool: the environment's process was lost, the remote sandbox was unreachable, or a rollout function gave the
  completion up.
- reset: the environment's reset failed, or its observation does not fit in the engine's context.
"""


class Episode(Protocol):
    """Process in which the tools of one completion run; it answers requests in their order."""

    def reset(self) -> "Future[CallResult]": ...
    def call(self, name: str, arguments: Mapping[str, Any]) -> "Future[CallResult]": ...
    def step(self, message: str) -> "Future[CallResult]": ...
    def reward(self) -> "Future[CallResult]": ...
    def close(self) -> None: ...


class Pool(Protocol):
    """Pool that opens episodes."""

    def open(self, environment: str | None, seed: int, columns: Mapping[str, Any], call_seed: int) -> Episode: ...


@dataclass(frozen=True)
class Start:
    """Completion before its first turn."""

    messages: Sequence[Message]
    """The problem's prompt."""
    environment: str | None
    """Name of its environment; None: the one without a name, or none."""
    columns: Mapping[str, Any]
    """Columns of the problem, for the environment's reset."""
    seed: int
    """Seed of the environment, the same for all completions of a group."""
    call_seed: int
    """Seed of random numbers in its tools."""
    sampling: Callable[[int, int], dict[str, Any]]
    """Maps the turn's number, from 0, and the tokens left for it to the arguments of `vllm.SamplingParams`."""


@dataclass(frozen=True)
class CallRecord:
    """One call of a tool, or one step of an environment."""

    name: str
    status: str
    """Status of the sandbox; "unknown", "unparsed" or "skipped" if nothing was called."""
    seconds: float
    turn: int


@dataclass(frozen=True)
class ConversationSummary:
    """Numbers of a conversation, for metrics."""

    turns: int
    ended: Ended
    tokens: int
    """Tokens of policy and results."""
    own_tokens: int
    calls: Sequence[CallRecord]
    unrewarded: bool = False
    """True if the environment's `get_reward` gave no number."""


@dataclass
class Conversation:
    """Finished completion. T tokens: those of the policy's turns and those of the results between them."""

    prompt_ids: list[int]
    token_ids: list[int]
    """(T,)"""
    logps: list[float | None]
    """(T,) log-probabilities of the engine in nats; 0 on tokens that the policy did not generate."""
    unprocessed_logps: list[float | None] | None
    """(T,) the same before filters and penalties; None if the engine uses none of these."""
    own: list[int]
    """(T,) 1 on tokens that the policy generated."""
    messages: list[Message]
    """Messages after the prompt."""
    reward: float | None
    """Reward of the environment; None without one, or if it failed."""
    ended: Ended
    turns: int
    calls: list[CallRecord]
    observation: str = ""
    """Text that the environment's reset has added to the prompt."""
    unrewarded: bool = False
    """True if the environment's `get_reward` gave no number."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of reward functions, which a rollout function gives."""
    truncated: bool | None = None
    """True if the completion was cut off, as a rollout function reported; None: by its last token."""

    def is_unscorable(self, rewards: Collection[str]) -> bool:
        """Return True if the environment has failed: it was lost, could not be reset, or gave no reward.

        Args:
            rewards: `rewards.functions`; a missing reward of the environment matters only if it is one of them.
        """
        return self.ended in ("tool", "reset") or (self.unrewarded and "environment" in rewards)

    @property
    def own_ids(self) -> list[int]:
        """Tokens that the policy generated."""
        return [token for token, own in zip(self.token_ids, self.own, strict=True) if own]

    @property
    def summary(self) -> ConversationSummary:
        calls = tuple(self.calls)
        return ConversationSummary(self.turns, self.ended, len(self.own), sum(self.own), calls, self.unrewarded)


def conversation_metrics(summaries: Sequence[ConversationSummary]) -> dict[str, float]:
    """Return the metrics of a step's completions over all workers."""
    count = max(1, len(summaries))
    calls = [call for each in summaries for call in each.calls]
    tokens = sum(each.tokens for each in summaries)

    by_tool: dict[str, list[CallRecord]] = {}
    for call in calls:
        # The names of unknown tools may be any text of the policy; a turn that was not read has a call without a name.
        if call.name and call.status not in ("unknown", "skipped"):
            by_tool.setdefault(call.name, []).append(call)

    def share_of_calls(*statuses: str) -> float:
        return sum(call.status in statuses for call in calls) / max(1, len(calls))

    def share_ended(*reasons: Ended) -> float:
        return sum(each.ended in reasons for each in summaries) / count

    return {
        "rollout/turns_mean": sum(each.turns for each in summaries) / count,
        "rollout/turns_max": float(max((each.turns for each in summaries), default=0)),
        "rollout/calls_mean": len(calls) / count,
        "rollout/result_token_share": 1 - sum(each.own_tokens for each in summaries) / max(1, tokens),
        "rollout/cut_by_turns_share": share_ended("turns"),
        "rollout/cut_by_length_share": share_ended("length"),
        "rollout/lost_share": share_ended("tool", "reset"),
        "rollout/unrewarded_share": sum(each.unrewarded for each in summaries) / count,
        "rollout/call_error_share": share_of_calls("error"),
        "rollout/call_timeout_share": share_of_calls("timeout"),
        "rollout/call_killed_share": share_of_calls("crash", "memory", "processes", "disk"),
        "rollout/call_unknown_share": share_of_calls("unknown"),
        "rollout/call_unparsed_share": share_of_calls("unparsed"),
        "rollout/call_skipped_share": share_of_calls("skipped"),
        "rollout/call_seconds_mean": sum(call.seconds for call in calls) / max(1, len(calls)),
        **{
            f"rollout/{name}/{measure}": value
            for name, its_calls in sorted(by_tool.items())
            for measure, value in {
                "calls_mean": len(its_calls) / count,
                "failed_share": sum(call.status != OK for call in its_calls) / len(its_calls),
                "seconds_mean": sum(call.seconds for call in its_calls) / len(its_calls),
            }.items()
        },
    }
