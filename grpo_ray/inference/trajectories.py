"""Input and result of a rollout function (`rollout.function`): a row for each completion, and the completion itself.

A function gets rows and a `RolloutPolicy` (`rollout_function.py`), and returns a `Trajectory` for each row, in order.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_ray.data.problem import RESERVED_COLUMNS
from grpo_ray.inference.sampling import Completion
from grpo_ray.rewards.completions import completion_text

Message = dict[str, Any]

LogProbabilities = list[float] | list[float | None]
"""Log-probabilities of tokens in nats; None where the engine returned none. In a function's result, each sampled token
must have a number."""

ROW_COLUMNS = ("prompt", "solution", "id", "epoch", "index")
"""Arguments of rewards that have fields of their own in a row, so they are not among its `columns`."""


@dataclass(frozen=True, kw_only=True)
class RolloutRow:
    """One completion that a rollout function has to produce: a problem, and the completion's number in its group."""

    prompt: Sequence[Message]
    """Chat messages, with `role` and `content`."""
    solution: str
    """Reference answer; "" if the problem has none."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """Further columns of the problem."""
    id: str
    """Id of the problem, 16 hex digits."""
    epoch: int
    index: int
    """Number of the completion in its group."""
    seed: int
    """Seed for random numbers of this completion, the same on every worker and after every restart; 63 bits."""
    group_seed: int
    """Seed that all completions of the group share, such as for a game that all of them play; 31 bits."""

    @property
    def key(self) -> tuple[str, int, int]:
        """Problem, epoch and index, which identify the completion."""
        return self.id, self.epoch, self.index

    def __str__(self) -> str:
        return f"problem {self.id}, epoch {self.epoch}, completion {self.index}"


@dataclass(eq=False)
class Trajectory:
    """Completion by a rollout function: tokens that the policy sampled, and other tokens between them. T tokens."""

    row: RolloutRow
    prompt_ids: list[int]
    """Token ids of the prompt."""
    token_ids: list[int] = field(default_factory=list)
    """(T,) token ids after the prompt."""
    logps: LogProbabilities = field(default_factory=list)
    """(T,) log-probabilities in nats with which the tokens were sampled; not read where `mask` is 0."""
    mask: list[int] = field(default_factory=list)
    """(T,) 1 on tokens that the policy sampled, which are trained on; 0 on other tokens."""
    unprocessed_logps: LogProbabilities = field(default_factory=list)
    """(T,) the same before filters and penalties. May be empty in a run without such options (`grpo.top_p` ...)."""
    messages: list[Message] = field(default_factory=list)
    """Messages after the prompt, for rewards and records. Empty: one message with the text of the policy's tokens."""
    truncated: bool = False
    """True if the completion ended because there was no space left."""
    failed: bool = False
    """True if something other than the policy failed, such as a service: the completion has no reward at all."""
    reward: float | None = None
    """Value of the reward `environment`; None if the function gives none."""
    columns: dict[str, Any] = field(default_factory=dict)
    """Further arguments of reward functions, by name; the same names in all trajectories."""

    @property
    def context(self) -> list[int]:
        """Token ids of prompt and completion so far."""
        return self.prompt_ids + self.token_ids

    @property
    def text(self) -> str:
        """Text of the policy's last turn; "" if the last message is not the policy's."""
        return completion_text(self.messages)

    def add_turn(self, completion: Completion) -> None:
        """Append the tokens of a request as the policy's own."""
        self.token_ids += completion.token_ids
        self.mask += [1] * len(completion.token_ids)
        self.logps = [*self.logps, *completion.logps]
        self.unprocessed_logps = [*self.unprocessed_logps, *(completion.unprocessed_logps or completion.logps)]
        self.truncated = completion.truncated

    def add_tokens(self, token_ids: Sequence[int]) -> None:
        """Append tokens that the policy did not sample; they have no gradient."""
        self.token_ids += token_ids
        self.mask += [0] * len(token_ids)
        self.logps = [*self.logps, *[0.0] * len(token_ids)]
        self.unprocessed_logps = [*self.unprocessed_logps, *[0.0] * len(token_ids)]


@dataclass(frozen=True, eq=False)
class EndpointAccess:
    """Access of one row's program to the endpoint of the engine (`RolloutPolicy.run_programs`)."""

    base_url: str
    """Address of the endpoint, in the form that OpenAI's clients expect."""
    api_key: str = field(repr=False)
    """Key of the row, valid while its program runs."""
    trajectory: Trajectory
    """Tokens and messages sampled with the key; the program may set `reward`, `columns` and `failed`."""

    @property
    def row(self) -> RolloutRow:
        """The row that the program samples a completion for."""
        return self.trajectory.row

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables from which OpenAI's clients read address and key."""
        return {"OPENAI_BASE_URL": self.base_url, "OPENAI_API_KEY": self.api_key}


@dataclass(frozen=True)
class TrajectoryRules:
    """Conditions that a trajectory must meet to be trained on."""

    max_completion_length: int
    """`grpo.max_completion_length`, tokens."""
    max_model_len: int
    """Longest prompt with its completion, tokens."""
    vocabulary_size: int
    """Number of token ids, which begin with 0."""
    processing: Collection[str] = ()
    """Options of the run that filter or penalize tokens; with any of them `unprocessed_logps` is required."""

    def mistake(self, trajectory: Trajectory) -> str | None:
        """Return the first mistake in a trajectory, or None if it can be trained on."""
        checks = (self._tokens, self._masks, self._logps, self._messages, self._reward)
        return next((found for check in checks if (found := check(trajectory))), None)

    def prompt_mistake(self, token_ids: Any) -> str | None:
        """Return the mistake in a prompt, or None if it can be completed."""
        if found := self._ids_mistake("prompt", token_ids):
            return found
        if not token_ids:
            return "the prompt has no tokens"
        if len(token_ids) >= self.max_model_len:
            return (
                f"the prompt has {len(token_ids)} tokens, and the engine's context of {self.max_model_len} tokens must "
                "hold prompt and completion"
            )
        return None

    def _ids_mistake(self, name: str, token_ids: Any) -> str | None:
        if not isinstance(token_ids, list) or not set(map(type, token_ids)) <= {int}:
            return f"{name} must be a list of token ids of type int, not {_kinds(token_ids)}"
        lowest, highest = min(token_ids, default=0), max(token_ids, default=0)
        if lowest < 0 or highest >= self.vocabulary_size:
            wrong = lowest if lowest < 0 else highest
            return f"{name} has the token id {wrong}; the vocabulary has {self.vocabulary_size}, from 0"
        return None

    def _tokens(self, trajectory: Trajectory) -> str | None:
        if found := self.prompt_mistake(trajectory.prompt_ids) or self._ids_mistake("token_ids", trajectory.token_ids):
            return found
        length, prompt = len(trajectory.token_ids), len(trajectory.prompt_ids)
        if length > self.max_completion_length:
            return f"token_ids has {length} tokens; grpo.max_completion_length is {self.max_completion_length}"
        if prompt + length > self.max_model_len:
            return (
                f"prompt_ids and token_ids have {prompt + length} tokens; the engine's context has {self.max_model_len}"
            )
        return None

    def _masks(self, trajectory: Trajectory) -> str | None:
        mask, length = trajectory.mask, len(trajectory.token_ids)
        if not isinstance(mask, list) or not set(map(type, mask)) <= {int} or not set(mask) <= {0, 1}:
            return "mask must be a list of 0 and 1 of type int"
        if len(mask) != length:
            return f"mask has {len(mask)} entries for {length} tokens"
        return None if any(mask) else "no token is the policy's own: mask has no 1"

    def _logps(self, trajectory: Trajectory) -> str | None:
        needed: dict[str, LogProbabilities] = {"logps": trajectory.logps}
        if self.processing or trajectory.unprocessed_logps:
            needed["unprocessed_logps"] = trajectory.unprocessed_logps
        length = len(trajectory.token_ids)
        for name, values in needed.items():
            if name == "unprocessed_logps" and not values:
                return f"unprocessed_logps is empty, and the run samples with {', '.join(self.processing)}"
            if not isinstance(values, list) or len(values) != length:
                return f"{name} must be a list of {length} numbers, one for each token; got {_kinds(values)}"
            for place, (own, value) in enumerate(zip(trajectory.mask, values, strict=True)):
                if own and not _is_finite(value):
                    return f"{name}[{place}] is {value!r}; the log-probability of a sampled token must be finite"
        return None

    def _messages(self, trajectory: Trajectory) -> str | None:
        messages = trajectory.messages
        is_chat = isinstance(messages, list) and all(
            isinstance(each, dict) and isinstance(each.get("role"), str) for each in messages
        )
        if not is_chat:
            return "messages must be a list of dicts with a role"
        wrong = next((each for each in messages if not isinstance(each.get("content"), str | list | None)), None)
        return None if wrong is None else f"the content of a message must be text, not {_kinds(wrong['content'])}"

    def _reward(self, trajectory: Trajectory) -> str | None:
        reward, columns = trajectory.reward, trajectory.columns
        if reward is not None and not _is_finite(reward):
            return f"reward is {reward!r}; it must be a finite number, or None"
        if not isinstance(columns, dict) or not all(isinstance(name, str) for name in columns):
            return "columns must be a dict with names"
        taken = {*ROW_COLUMNS, *RESERVED_COLUMNS, *trajectory.row.columns}
        wrong = next((name for name in columns if name in taken), None)
        return None if wrong is None else f"columns has {wrong!r}, which is an argument of rewards already; rename it"


def _is_finite(value: Any) -> bool:
    return type(value) in (float, int) and math.isfinite(value)


def _kinds(value: Any) -> str:
    """Describe the type of a value, and of the items of a list."""
    if not isinstance(value, list):
        return type(value).__name__
    kinds = ", ".join(sorted({type(each).__name__ for each in value}))
    return f"a list of {len(value)}" + (f" {kinds}" if kinds else "")
