"""Conversation that has not ended: its state between two turns, its form in a checkpoint, and its episode's requests.

With `rollout.max_staleness` above 1, a conversation may be open at the end of a step, and a checkpoint holds it. Its
processes cannot be saved. So the conversation keeps the requests to its episode, and after a resume a new episode gets
the same requests in the same order. If it answers one of them differently, its state is another one than that the
policy has seen, and the conversation begins anew.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from typing import Any, get_args

from grpo_ray.tools.conversation import CallRecord, Conversation, Ended, Episode, Pool, Start
from grpo_ray.tools.definitions import ToolSet
from grpo_ray.tools.sandbox.protocol import CallResult
from grpo_ray.tools.template import AssistantTurn, Message


@dataclass(eq=False)
class EpisodeRequest:
    """One request to an episode."""

    kind: str
    """"reset", "call" or "step"."""
    name: str = ""
    """Tool that is called."""
    argument: Any = None
    """Arguments of the call, or message of the step."""
    turn: int = 0
    """Number of turns before it; requests of the same turn are sent together."""
    answer: str | None = None
    """Digest of the answer, as a checkpoint holds it; None for a request of this process."""
    future: "Future[CallResult] | None" = None

    def send(self, episode: Episode) -> "Future[CallResult]":
        """Send the request; a repeated one keeps the digest of the first answer."""
        if self.kind == "reset":
            self.future = episode.reset()
        elif self.kind == "call":
            self.future = episode.call(self.name, self.argument)
        else:
            self.future = episode.step(self.argument)
        return self.future

    def digest(self) -> str:
        """Wait for the answer, and hash what the policy can see of it into 16 hex digits."""
        assert self.future is not None
        result = self.future.result()
        shown = json.dumps([result.status, result.text, result.done]).encode()
        return hashlib.blake2b(shown, digest_size=8).hexdigest()

    def to_json(self) -> list[Any]:
        return [self.kind, self.name, self.argument, self.turn, self.digest()]

    @staticmethod
    def from_json(value: Sequence[Any]) -> "EpisodeRequest":
        kind, name, argument, turn, answer = value
        if kind not in ("reset", "call", "step"):
            raise ValueError(f"an episode has no request {kind!r}")
        kinds: dict[str, type] = {"reset": type(None), "call": dict, "step": str}
        if not isinstance(argument, kinds[kind]):
            raise ValueError(f"a {kind} has the argument {argument!r}")
        return EpisodeRequest(kind, str(name), argument, int(turn), str(answer))


@dataclass(eq=False)
class OpenConversation:
    """Conversation that has not ended, or whose reward is still awaited."""

    row: int
    """Place of its row among those of the turn loop."""
    start: Start
    tools: ToolSet
    episode: Episode | None = None
    """None before the first turn, after a resume, and once the conversation is finished."""
    requests: list[EpisodeRequest] = field(default_factory=list)
    """Requests to the episode so far, without that for the reward."""
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
    finished: bool = False
    """True once it has ended, and its reward is known if it has one."""
    reward: float | None = None
    unrewarded: bool = False
    """True if the environment's `get_reward` gave no number."""
    has_begun_anew: bool = False
    """True if its earlier turns were deleted since it was restored."""

    @property
    def is_scored(self) -> bool:
        """True once it has ended and its reward has arrived, if it has one."""
        return self.ended is not None and (self.scored is None or self.scored.done())

    @property
    def context(self) -> list[int]:
        return self.prompt_ids + self.token_ids

    def append(self, token_ids: Sequence[int], own: int) -> None:
        """Append tokens; own: 1 if the policy generated them. Their log-probabilities are appended separately."""
        self.token_ids += token_ids
        self.own += [own] * len(token_ids)

    def open(self, pool: Pool) -> None:
        """Open the episode."""
        start = self.start
        self.episode = pool.open(start.environment, start.seed, start.columns, start.call_seed)

    def close(self) -> None:
        """End the episode's processes; once they have ended, this does nothing."""
        episode, self.episode = self.episode, None
        if episode is not None:
            episode.close()

    def send(self, kind: str, name: str = "", argument: Any = None) -> "Future[CallResult]":
        """Send a request to the episode, and keep it."""
        assert self.episode is not None
        request = EpisodeRequest(kind, name, argument, self.turns)
        self.requests.append(request)
        return request.send(self.episode)

    def repeat_requests(self, turn: int) -> None:
        """Send the requests of a turn again, to the new episode of a conversation from a checkpoint."""
        assert self.episode is not None
        for request in self._requests_of(turn):
            request.send(self.episode)

    def find_difference(self, turn: int, on_result: Callable[[], None]) -> str | None:
        """Wait for the answers to the repeated requests of a turn.

        Args:
            on_result: called after each answer.

        Returns:
            The name of the first request with another answer than before; None without one.
        """
        different = None
        for request in self._requests_of(turn):
            if request.digest() != request.answer:
                different = different or request.name or request.kind
            on_result()
        return different

    def _requests_of(self, turn: int) -> list[EpisodeRequest]:
        return [request for request in self.requests if request.turn == turn]

    def begin_anew(self, pool: Pool) -> None:
        """Delete all turns, and open another episode."""
        self.close()
        fresh = OpenConversation(self.row, self.start, self.tools)
        self.__dict__.update(fresh.__dict__)
        self.has_begun_anew = True
        self.open(pool)

    def conversation(self) -> Conversation:
        """Return the conversation as it has ended."""
        assert self.ended is not None
        return Conversation(
            self.prompt_ids,
            self.token_ids,
            self.logps,
            self.unprocessed or None,
            self.own,
            self.messages,
            self.reward,
            self.ended,
            self.turns,
            self.calls,
            self.observation,
            self.unrewarded,
        )

    # Checkpoints

    def state(self) -> dict[str, Any]:
        """Return all but tokens and log-probabilities, in JSON types; between two turns, or once it is finished."""
        assert self.turn is None and not self.pending and (self.ended is None or self.finished)
        return {
            "requests": [] if self.finished else [request.to_json() for request in self.requests],
            "prompt_ids": self.prompt_ids,
            "messages": self.messages,
            "calls": [asdict(call) for call in self.calls],
            "turns": self.turns,
            "ended": self.ended,
            "failed_reset": self.failed_reset,
            "observation": self.observation,
            "reward": self.reward,
            "unrewarded": self.unrewarded,
        }

    def restore(
        self,
        state: Mapping[str, Any],
        token_ids: Sequence[int],
        own: Sequence[int],
        logps: Sequence[float | None],
        unprocessed: Sequence[float | None],
    ) -> None:
        """Continue from a checkpoint, at the first turn that is missing.

        Args:
            state: from `state`.
            token_ids, own, logps: (T,)
            unprocessed: (T,) or empty.

        Raises:
            ValueError: the state has another form.
        """
        try:
            self.requests = [EpisodeRequest.from_json(each) for each in state["requests"]]
            self.prompt_ids = [int(each) for each in state["prompt_ids"]]
            self.messages = [dict(each) for each in state["messages"]]
            self.calls = [CallRecord(**each) for each in state["calls"]]
            self.turns, self.ended = int(state["turns"]), state["ended"]
            self.failed_reset, self.observation = bool(state["failed_reset"]), str(state["observation"])
            self.reward, self.unrewarded = state["reward"], bool(state["unrewarded"])
        except (KeyError, TypeError) as error:
            raise ValueError(f"the state of a conversation lacks a part: {error}") from error
        if self.reward is not None and not isinstance(self.reward, int | float):
            raise ValueError(f"the reward of a conversation is {self.reward!r}")
        if self.ended is not None and self.ended not in get_args(Ended):
            raise ValueError(f"a conversation cannot have ended with {self.ended!r}")
        # Any other name could be that of any attribute of the environment.
        called = [each.name for each in self.requests if each.kind == "call"]
        if unknown := [name for name in called if name not in self.tools.names]:
            raise ValueError(f"an earlier turn has called {unknown[0]!r}, which is no tool of the run")
        self.token_ids, self.own, self.logps = list(token_ids), list(own), list(logps)
        self.unprocessed = list(unprocessed)
        self.finished = self.ended is not None
