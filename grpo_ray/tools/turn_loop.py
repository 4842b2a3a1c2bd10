"""Completions of several turns: the policy writes, and tools and environments respond, until the completion ends.

Completions run together, in rounds. In a round the engine generates the next turn of each active completion. At most
`rollout.max_active` completions of a batch are active; when one ends, the next one becomes active. A tool is called as
soon as its own turn is finished, while other turns are still being generated. The next round begins, in the order of
the rows, when the results of all completions have arrived. If each completion continued on its own, the engine's
batches, and with them floating-point rounding, would depend on timing.

Training, held-out measuring and `grpo-ray eval` run the same loop. It depends on neither TRL nor vLLM.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from grpo_ray.config.schema import RolloutConfig
from grpo_ray.tools.definitions import RolloutDefinition, ToolSet
from grpo_ray.tools.sandbox.protocol import CallResult
from grpo_ray.tools.template import AssistantTurn, Message, ToolCall, ToolTemplate

logger = logging.getLogger(__name__)

LOGGED_CHARS = 200
"""Characters of an environment's error that are logged."""

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


class GeneratedTurn(Protocol):
    """Turn as the engine returns it; `inference.sampling.Completion` is one."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def logps(self) -> list[float | None]: ...
    @property
    def unprocessed_logps(self) -> list[float | None]: ...


class Generate(Protocol):
    """Function that generates one turn for each prompt on the engine."""

    def __call__(
        self,
        prompts: list[list[int]],
        sampling: list[dict[str, Any]],
        on_finished: Callable[[int, list[int]], None],
        /,
    ) -> Sequence[GeneratedTurn]: ...


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


@dataclass(eq=False)
class _Rollout:
    """Completion that has not ended yet."""

    row: int
    start: Start
    tools: ToolSet
    episode: Episode
    prompt: list[Message] = field(default_factory=list)
    prompt_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logps: list[float | None] = field(default_factory=list)
    unprocessed: list[float | None] = field(default_factory=list)
    own: list[int] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    calls: list[CallRecord] = field(default_factory=list)
    turns: int = 0
    ended: Ended | None = None
    failed_reset: bool = False
    observation: str = ""
    tokens_left: int = 0
    """Maximum tokens of the current turn."""
    turn: AssistantTurn | None = None
    """Current turn, once it has been read; None between rounds."""
    pending: "list[tuple[str, Future[CallResult] | str]]" = field(default_factory=list)
    """Calls of the turn in order: the name, and the future result or the status of a call that cannot be made."""
    scored: "Future[CallResult] | None" = None

    @property
    def is_scored(self) -> bool:
        """True once it has ended and its reward is known, if it has one."""
        return self.ended is not None and (self.scored is None or self.scored.done())

    @property
    def context(self) -> list[int]:
        return self.prompt_ids + self.token_ids

    def append(self, token_ids: Sequence[int], own: int) -> None:
        """Append tokens; own: 1 if the policy generated them. Their log-probabilities are appended separately."""
        self.token_ids += token_ids
        self.own += [own] * len(token_ids)


def run_conversations(
    starts: Sequence[Start],
    *,
    template: ToolTemplate,
    definition: RolloutDefinition,
    pool: Pool,
    limits: RolloutConfig,
    max_completion_length: int,
    max_model_len: int,
    generate: Generate,
    is_any_active: Callable[[bool], bool] = bool,
    on_ended: Callable[[int, Conversation], None] = lambda row, conversation: None,
    on_result: Callable[[], None] = lambda: None,
) -> list[Conversation]:
    """Run completions to their end, at most `rollout.max_active` at a time.

    Args:
        starts: (B,)
        max_completion_length: tokens of policy and results in one completion.
        max_model_len: tokens of prompt and completion.
        generate: generates a turn for each of the active completions.
        is_any_active: collective among the workers that share an engine: returns whether any has an active completion.
            All of them then take part in the round.
        on_ended: called with row and conversation of a completion that has ended, before the environment's reward and
            the log-probabilities of the last turn are known.
        on_result: called after each result of a tool or an environment, as a sign of progress.

    Returns:
        (B,) conversations, in the order of the starts.
    """
    loop = _Loop(template, definition, limits, max_completion_length, max_model_len, on_ended, on_result)
    waiting = deque(enumerate(starts))
    active: list[_Rollout] = []
    ended: list[_Rollout] = []
    finished: dict[int, Conversation] = {}
    try:
        while is_any_active(bool(active or waiting)):
            begun = len(active)
            while waiting and len(active) < limits.max_active:
                while ended and len(active) + len(ended) >= limits.max_active:  # wait for the reward of the oldest one
                    oldest = ended.pop(0)
                    finished[oldest.row] = loop.finish(oldest)
                row, start = waiting.popleft()
                episode = pool.open(start.environment, start.seed, start.columns, start.call_seed)
                active.append(_Rollout(row, start, definition.tool_set(start.environment), episode))
            loop.begin(active[begun:])
            loop.take_turns(active, generate)
            ended += [each for each in active if each.ended is not None]
            active = [each for each in active if each.ended is None]
            for each in [each for each in ended if each.is_scored]:  # do not wait for the other rewards
                ended.remove(each)
                finished[each.row] = loop.finish(each)
        while ended:
            each = ended.pop()
            finished[each.row] = loop.finish(each)
        if loop.failures:
            logger.warning(
                "failures of environments or sandboxes: %d; the first: %s", len(loop.failures), loop.failures[0]
            )
        return [finished[row] for row in range(len(starts))]
    finally:
        for each in (*active, *ended):
            each.episode.close()


@dataclass(frozen=True)
class _Loop:
    """Rounds of all completions, with the settings that they have in common."""

    template: ToolTemplate
    definition: RolloutDefinition
    limits: RolloutConfig
    max_completion_length: int
    max_model_len: int
    on_ended: Callable[[int, Conversation], None]
    on_result: Callable[[], None]
    failures: list[str] = field(default_factory=list)
    """Errors of resets, rewards and remote sandboxes."""

    def begin(self, rollouts: Sequence[_Rollout]) -> None:
        """Reset the environments, and render the prompts."""
        resets = [
            each.episode.reset() if each.start.environment in self.definition.environments else None
            for each in rollouts
        ]
        for each, reset in zip(rollouts, resets, strict=True):
            each.prompt = [dict(message) for message in each.start.messages]
            if reset is None:
                continue
            result = reset.result()
            self.on_result()
            each.failed_reset = result.status != OK
            if each.failed_reset:
                self.failures.append(f"reset: {_for_log(result)}")
            if result.text and not each.failed_reset:
                each.observation = self.template.neutralize(result.text, self.max_model_len)
                each.prompt[-1]["content"] += each.observation
        self._render(rollouts)
        # The lengths of the problems' own prompts were checked before the run; an observation may have any length.
        has_reset = [each for each in rollouts if each.start.environment in self.definition.environments]
        overlong = [each for each in has_reset if len(each.prompt_ids) >= self.max_model_len]
        for each in overlong:
            each.prompt, each.observation = [dict(message) for message in each.start.messages], ""
            each.failed_reset = True
            self.failures.append(f"reset: its text exceeds the engine's context of {self.max_model_len} tokens")
        self._render(overlong)

    def _render(self, rollouts: Sequence[_Rollout]) -> None:
        """Tokenize the prompts."""
        prompts = self.template.render([each.prompt for each in rollouts], [each.tools for each in rollouts])
        for each, ids in zip(rollouts, prompts, strict=True):
            each.prompt_ids = ids

    def take_turns(self, active: Sequence[_Rollout], generate: Generate) -> None:
        """Generate one turn of each completion, and append the responses of tools and environments."""
        for each in active:
            left = self.max_completion_length - len(each.token_ids)
            each.tokens_left = max(1, min(left, self.max_model_len - len(each.context)))
        completions = generate(
            [each.context for each in active],
            [each.start.sampling(each.turns, each.tokens_left) for each in active],
            lambda index, token_ids: self._read_turn(active[index], token_ids),
        )
        for each, completion in zip(active, completions, strict=True):
            if each.turn is None:
                self._read_turn(each, completion.token_ids)
            each.logps += completion.logps
            each.unprocessed += completion.unprocessed_logps
        for each in active:
            self._respond(each)

    def _read_turn(self, rollout: _Rollout, token_ids: Sequence[int]) -> None:
        """Read a finished turn, and start its calls."""
        rollout.turn = turn = self.template.parse(rollout.context, token_ids, rollout.tools)
        rollout.append(token_ids, own=1)  # before `on_ended` is called; log-probabilities follow after the round
        rollout.turns += 1
        rollout.messages.append(turn.message)
        if turn.is_unread:
            rollout.calls.append(CallRecord("", "unparsed", 0.0, rollout.turns))
        if rollout.failed_reset:
            self._end(rollout, "reset")
        elif len(token_ids) >= rollout.tokens_left:
            self._end(rollout, "length")
        elif not turn.calls and not self.definition.has_step(rollout.start.environment):
            self._end(rollout, "stop")
        elif rollout.turns >= self.limits.max_turns:
            self._end(rollout, "turns")
        elif turn.calls:
            made, others = turn.calls[: self.limits.max_calls], turn.calls[self.limits.max_calls :]
            rollout.pending = [(call.name, self._start(rollout, call)) for call in made]
            rollout.pending += [(call.name, "skipped") for call in others]
        else:
            rollout.pending = [("step", rollout.episode.step(turn.message["content"]))]

    def _start(self, rollout: _Rollout, call: ToolCall) -> "Future[CallResult] | str":
        if call.name not in rollout.tools.names:
            return "unknown"
        return "unparsed" if call.arguments is None else rollout.episode.call(call.name, call.arguments)

    def _respond(self, rollout: _Rollout) -> None:
        """Wait for the results of a turn, and append them, unless the completion ends."""
        assert rollout.turn is not None
        has_calls, rollout.turn = bool(rollout.turn.calls), None
        pending, rollout.pending = rollout.pending, []
        if rollout.ended is not None:
            return
        messages: list[Message] = []
        is_done = is_lost = False
        for name, called in pending:
            result = None if isinstance(called, str) else called.result()
            self.on_result()
            status = called if isinstance(called, str) else result.status if result else OK
            rollout.calls.append(CallRecord(name, status, result.seconds if result else 0.0, rollout.turns))
            is_done |= result is not None and result.done
            if name not in self.definition.code_tools | self.definition.remote_tools:
                is_lost |= status not in RETURNED and rollout.start.environment in self.definition.environments
            if result is not None and status == UNREACHABLE:  # not the policy's fault, so it is not scored
                is_lost = True
                self.failures.append(f"{name}: {_for_log(result)}")
            text = self._text_of(name, status, result)
            if has_calls:
                # Some templates render the name, and the name of an unknown tool may be any text of the policy.
                shown = name if name in rollout.tools.names else self._neutralize(name)
                messages.append({"role": "tool", "name": shown, "content": text or ""})
            elif text is None:
                is_done = True
            else:
                messages.append({"role": "user", "content": text})
        if is_lost or is_done:
            self._end(rollout, "tool" if is_lost else "done")
            return
        ids = self.template.result_ids(messages)
        length = len(rollout.token_ids) + len(ids)
        if length >= self.max_completion_length or len(rollout.prompt_ids) + length >= self.max_model_len:
            self._end(rollout, "length")
            return
        rollout.messages += messages
        rollout.append(ids, own=0)
        rollout.logps += [0.0] * len(ids)
        rollout.unprocessed += [0.0] * len(ids) if rollout.unprocessed else []

    def _text_of(self, name: str, status: str, result: CallResult | None) -> str | None:
        """Return the text of a call's result that the policy reads."""
        if status == OK:
            return None if result is None or result.text is None else self._neutralize(result.text)
        if status == "unknown":
            error = f"Tool {name} not found."
        elif status == "unparsed":
            error = "The arguments of the call are not a JSON object."
        elif status == "skipped" and result is None:
            error = f"A turn may have {self.limits.max_calls} calls."
        else:
            error = (result.text if result else None) or status
        return self._neutralize(str({"error": error}))

    def _neutralize(self, text: str) -> str:
        return self.template.neutralize(text, self.limits.max_result_tokens)

    def _end(self, rollout: _Rollout, reason: Ended) -> None:
        rollout.ended = reason
        if self.definition.has_reward(rollout.start.environment) and reason not in ("tool", "reset"):
            rollout.scored = rollout.episode.reward()
        self.on_ended(rollout.row, self._conversation(rollout, None))

    def finish(self, rollout: _Rollout) -> Conversation:
        """Wait for the reward of a completion that has ended, end its process, and return its conversation."""
        try:
            result = None if rollout.scored is None else rollout.scored.result()
        finally:
            rollout.episode.close()
        self.on_result()
        reward = result.value if result is not None and result.status == OK else None
        if result is not None and reward is None:
            self.failures.append(f"get_reward: {_for_log(result)}")
        return self._conversation(rollout, reward, unrewarded=result is not None and reward is None)

    def _conversation(self, rollout: _Rollout, reward: float | None, unrewarded: bool = False) -> Conversation:
        assert rollout.ended is not None
        return Conversation(
            rollout.prompt_ids,
            rollout.token_ids,
            rollout.logps,
            rollout.unprocessed or None,
            rollout.own,
            rollout.messages,
            reward,
            rollout.ended,
            rollout.turns,
            rollout.calls,
            rollout.observation,
            unrewarded,
        )


def _for_log(result: CallResult) -> str:
    """Return a tool's message about its failure as one line of harmless characters."""
    return ascii(result.text[:LOGGED_CHARS]) if result.text else result.status


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
