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
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from grpo_ray.config.schema import RolloutConfig
from grpo_ray.tools.conversation import OK, RETURNED, UNREACHABLE, CallRecord, Conversation, Ended, Pool
from grpo_ray.tools.definitions import RolloutDefinition
from grpo_ray.tools.open_conversation import OpenConversation
from grpo_ray.tools.sandbox.protocol import CallResult
from grpo_ray.tools.template import Message, ToolCall, ToolTemplate

logger = logging.getLogger(__name__)

LOGGED_CHARS = 200
"""Characters of an environment's error that are logged."""


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


def ignore_turn(row: int, context: list[int], turn: Any) -> None:
    """Do nothing."""


@dataclass(frozen=True, kw_only=True)
class TurnLoop:
    """Turns of many conversations, at most `rollout.max_active` at a time."""

    template: ToolTemplate
    definition: RolloutDefinition
    pool: Pool
    limits: RolloutConfig
    max_completion_length: int
    """Tokens of policy and results in one completion."""
    max_model_len: int
    """Tokens of prompt and completion."""
    generate: Generate
    """Generates a turn for each of the active conversations."""
    is_any_active: Callable[[bool], bool] = bool
    """Collective among the workers that share an engine: returns whether any has an active conversation. All of them
    then take part in the round."""
    on_ended: Callable[[int, Conversation], None] = lambda row, conversation: None
    """Called with row and conversation of one that has ended, before the environment's reward and the log-probabilities
    of the last turn are known."""
    on_result: Callable[[], None] = lambda: None
    """Called after each result of a tool or an environment, as a sign of progress."""
    on_turn: Callable[[int, list[int], Any], None] = ignore_turn
    """Called with row, context and result of each turn that was generated, `GeneratedTurn`."""
    failures: list[str] = field(default_factory=list)
    """Errors of resets, rewards and remote sandboxes."""

    def run(self, conversations: Sequence[OpenConversation]) -> list[Conversation]:
        """Run conversations from the beginning to the end.

        Args:
            conversations: (B,) conversations before their first turn.

        Returns:
            (B,)
        """
        for row, each in enumerate(conversations):
            each.row = row
        try:
            self.take_turns(conversations, [self.limits.max_turns] * len(conversations))
            return [each.conversation() for each in conversations]
        finally:
            for each in conversations:
                each.close()

    def take_turns(self, conversations: Sequence[OpenConversation], turn_limits: Sequence[int]) -> None:
        """Take turns in conversations, until each has ended or has its largest number of turns for now.

        Args:
            conversations: (B,) conversations that have not ended. One that was begun before goes on in its episode; one
                from a checkpoint gets a new episode, which answers its earlier requests again.
            turn_limits: (B,) largest number of turns after this call, those before it included.
        """
        waiting = deque(zip(conversations, turn_limits, strict=True))
        active: list[tuple[OpenConversation, int]] = []
        ended: list[OpenConversation] = []
        while self.is_any_active(bool(active or waiting)):
            begun = len(active)
            while waiting and len(active) < self.limits.max_active:
                while ended and len(active) + len(ended) >= self.limits.max_active:  # wait for the oldest one's reward
                    self._finish(ended.pop(0))
                active.append(waiting.popleft())
            self._open([each for each, _ in active[begun:] if each.episode is None])
            self._take_turn([each for each, _ in active])
            ended += [each for each, _ in active if each.ended is not None]
            active = [(each, limit) for each, limit in active if each.ended is None and each.turns < limit]
            for each in [each for each in ended if each.is_scored]:  # do not wait for the other rewards
                ended.remove(each)
                self._finish(each)
        while ended:
            self._finish(ended.pop())
        if self.failures:
            logger.warning(
                "failures of environments or sandboxes: %d; the first: %s", len(self.failures), self.failures[0]
            )

    def _open(self, conversations: Sequence[OpenConversation]) -> None:
        """Open the episodes of new conversations and of those from a checkpoint."""
        continued = [each for each in conversations if each.turns]
        for each in conversations:
            each.open(self.pool)
        fresh = [each for each in conversations if not each.turns]
        # One turn after the other, as at the first time: requests that wait behind one that ends the process are
        # skipped.
        for turn in range(max((each.turns for each in continued), default=-1) + 1):
            for each in continued:
                each.repeat_requests(turn)
            for each in list(continued):
                if (name := each.find_difference(turn, self.on_result)) is not None:
                    logger.warning(
                        "a completion from the checkpoint begins anew: %s answered a repeated request differently", name
                    )
                    each.begin_anew(self.pool)
                    continued.remove(each)
                    fresh.append(each)
        self._reset(fresh)

    def _reset(self, conversations: Sequence[OpenConversation]) -> None:
        """Reset the environments, and render the prompts."""
        resets = [
            each.send("reset") if each.start.environment in self.definition.environments else None
            for each in conversations
        ]
        for each, reset in zip(conversations, resets, strict=True):
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
        self._render(conversations)
        # The lengths of the problems' own prompts were checked before the run; an observation may have any length.
        has_reset = [each for each in conversations if each.start.environment in self.definition.environments]
        overlong = [each for each in has_reset if len(each.prompt_ids) >= self.max_model_len]
        for each in overlong:
            each.prompt, each.observation = [dict(message) for message in each.start.messages], ""
            each.failed_reset = True
            self.failures.append(f"reset: its text exceeds the engine's context of {self.max_model_len} tokens")
        self._render(overlong)

    def _render(self, conversations: Sequence[OpenConversation]) -> None:
        """Tokenize the prompts."""
        prompts = self.template.render([each.prompt for each in conversations], [each.tools for each in conversations])
        for each, ids in zip(conversations, prompts, strict=True):
            each.prompt_ids = ids

    def _take_turn(self, active: Sequence[OpenConversation]) -> None:
        """Generate one turn of each completion, and append the responses of tools and environments."""
        for each in active:
            left = self.max_completion_length - len(each.token_ids)
            each.tokens_left = max(1, min(left, self.max_model_len - len(each.context)))
        contexts = {each.row: each.context for each in active}
        completions = self.generate(
            [contexts[each.row] for each in active],
            [each.start.sampling(each.turns, each.tokens_left) for each in active],
            lambda index, token_ids: self._read_turn(active[index], token_ids),
        )
        for each, completion in zip(active, completions, strict=True):
            if each.turn is None:
                self._read_turn(each, completion.token_ids)
            each.logps += completion.logps
            each.unprocessed += completion.unprocessed_logps
            self.on_turn(each.row, contexts[each.row], completion)
        for each in active:
            self._respond(each)

    def _read_turn(self, conversation: OpenConversation, token_ids: Sequence[int]) -> None:
        """Read a finished turn, and start its calls."""
        conversation.turn = turn = self.template.parse(conversation.context, token_ids, conversation.tools)
        conversation.append(token_ids, own=1)  # before `on_ended` is called; log-probabilities follow after the round
        conversation.turns += 1
        conversation.messages.append(turn.message)
        if turn.is_unread:
            conversation.calls.append(CallRecord("", "unparsed", 0.0, conversation.turns))
        if conversation.failed_reset:
            self._end(conversation, "reset")
        elif len(token_ids) >= conversation.tokens_left:
            self._end(conversation, "length")
        elif not turn.calls and not self.definition.has_step(conversation.start.environment):
            self._end(conversation, "stop")
        elif conversation.turns >= self.limits.max_turns:
            self._end(conversation, "turns")
        elif turn.calls:
            made, others = turn.calls[: self.limits.max_calls], turn.calls[self.limits.max_calls :]
            conversation.pending = [(call.name, self._start(conversation, call)) for call in made]
            conversation.pending += [(call.name, "skipped") for call in others]
        else:
            conversation.pending = [("step", conversation.send("step", argument=turn.message["content"]))]

    def _start(self, conversation: OpenConversation, call: ToolCall) -> "Future[CallResult] | str":
        if call.name not in conversation.tools.names:
            return "unknown"
        if call.arguments is None:
            return "unparsed"
        return conversation.send("call", call.name, call.arguments)

    def _respond(self, conversation: OpenConversation) -> None:
        """Wait for the results of a turn, and append them, unless the completion ends."""
        assert conversation.turn is not None
        has_calls, conversation.turn = bool(conversation.turn.calls), None
        pending, conversation.pending = conversation.pending, []
        if conversation.ended is not None:
            return
        messages: list[Message] = []
        is_done = is_lost = False
        for name, called in pending:
            result = None if isinstance(called, str) else called.result()
            self.on_result()
            status = called if isinstance(called, str) else result.status if result else OK
            conversation.calls.append(CallRecord(name, status, result.seconds if result else 0.0, conversation.turns))
            is_done |= result is not None and result.done
            if name not in self.definition.code_tools | self.definition.remote_tools:
                is_lost |= status not in RETURNED and conversation.start.environment in self.definition.environments
            if result is not None and status == UNREACHABLE:  # not the policy's fault, so it is not scored
                is_lost = True
                self.failures.append(f"{name}: {_for_log(result)}")
            text = self._text_of(name, status, result)
            if has_calls:
                # Some templates render the name, and the name of an unknown tool may be any text of the policy.
                shown = name if name in conversation.tools.names else self._neutralize(name)
                messages.append({"role": "tool", "name": shown, "content": text or ""})
            elif text is None:
                is_done = True
            else:
                messages.append({"role": "user", "content": text})
        if is_lost or is_done:
            self._end(conversation, "tool" if is_lost else "done")
            return
        ids = self.template.result_ids(messages)
        length = len(conversation.token_ids) + len(ids)
        if length >= self.max_completion_length or len(conversation.prompt_ids) + length >= self.max_model_len:
            self._end(conversation, "length")
            return
        conversation.messages += messages
        conversation.append(ids, own=0)
        conversation.logps += [0.0] * len(ids)
        conversation.unprocessed += [0.0] * len(ids) if conversation.unprocessed else []

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

    def _end(self, conversation: OpenConversation, reason: Ended) -> None:
        conversation.ended = reason
        if self.definition.has_reward(conversation.start.environment) and reason not in ("tool", "reset"):
            assert conversation.episode is not None
            conversation.scored = conversation.episode.reward()
        self.on_ended(conversation.row, conversation.conversation())

    def _finish(self, conversation: OpenConversation) -> None:
        """Wait for the reward of a conversation that has ended, and end its processes."""
        try:
            result = None if conversation.scored is None else conversation.scored.result()
        finally:
            conversation.close()
        self.on_result()
        conversation.reward = result.value if result is not None and result.status == OK else None
        conversation.unrewarded = result is not None and conversation.reward is None
        if result is not None and conversation.unrewarded:
            self.failures.append(f"get_reward: {_for_log(result)}")
        conversation.finished = True


def _for_log(result: CallResult) -> str:
    """Return a tool's message about its failure as one line of harmless characters."""
    return ascii(result.text[:LOGGED_CHARS]) if result.text else result.status
