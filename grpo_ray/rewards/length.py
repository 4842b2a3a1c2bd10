"""Rewards for the length of a completion, in tokens. Lengths come from TRL's `completion_ids`.

Soft overlong punishment and the repetition penalty are TRL's own. Its cosine reward is not used: it verifies
answers inside the trainer without any limit; the one here asks the pool.
"""

import math
from collections.abc import Sequence
from typing import Any

from grpo_ray.errors import RewardError
from grpo_ray.rewards.correctness import Completion, accuracy_reward

Ids = Sequence[Sequence[int]]


def soft_overlong(completion_ids: Ids, *, max_length: int, buffer: int, **kwargs: Any) -> list[float]:
    """DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13), TRL's own.

    0.0 up to `max_length - buffer` tokens, then falling to -1.0 at `max_length`, and -1.0 beyond.
    Raises RewardError unless 0 <= buffer <= max_length.
    """
    if not 0 <= buffer <= max_length:
        raise RewardError(f"buffer={buffer} must lie in 0 to max_length={max_length} (tokens)")
    from trl.rewards import get_soft_overlong_punishment

    punish = get_soft_overlong_punishment(max_completion_len=max_length, soft_punish_cache=buffer)
    return list(punish(completion_ids=completion_ids))


def repetition_penalty(
    completion_ids: Ids, *, ngram_size: int = 3, max_penalty: float = -1.0, **kwargs: Any
) -> list[float]:
    """The share of repeated n-grams of tokens times `max_penalty` (arXiv 2502.03373, appendix C.2), TRL's
    own.
    """
    if ngram_size < 1 or max_penalty > 0:
        raise RewardError(f"ngram_size={ngram_size} must be at least 1 and max_penalty={max_penalty} at most 0")
    from trl.rewards import get_repetition_penalty_reward

    return list(get_repetition_penalty_reward(ngram_size, max_penalty)(completion_ids=completion_ids))


def conciseness(completion_ids: Ids, *, target: int, max_length: int, **kwargs: Any) -> list[float]:
    """1.0 up to `target` tokens, falling in a line to 0.0 at `max_length`. Blind to rightness: weigh it
    lightly.

    Raises RewardError unless 0 <= target < max_length.
    """
    if not 0 <= target < max_length:
        raise RewardError(f"target={target} must lie in 0 to max_length={max_length} (tokens), below the latter")
    return [min(1.0, max(0.0, (max_length - len(ids)) / (max_length - target))) for ids in completion_ids]


def cosine_length(
    completions: Sequence[Completion],
    solution: Sequence[str],
    completion_ids: Ids,
    *,
    max_length: int,
    right: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
    strict: bool = True,
    **kwargs: Any,
) -> list[float | None]:
    """Correctness scaled by length along half a cosine (arXiv 2502.03373, appendix C.1).

    right, wrong: the reward of a right and a wrong completion of no length and of `max_length` tokens. By
    default short right ones earn most, and wrong ones lose less the longer they tried. None where the
    solution is not understood. Raises RewardError unless max_length is above 0.
    """
    if max_length < 1:
        raise RewardError(f"max_length={max_length} must be at least 1 (tokens)")
    rewards: list[float | None] = []
    for reward, ids in zip(accuracy_reward(completions, solution, strict=strict), completion_ids, strict=True):
        if reward is None:
            rewards.append(None)
            continue
        shortest, longest = right if reward else wrong
        # Clamped: past max_length the cosine would climb again.
        progress = min(len(ids) / max_length, 1.0)
        rewards.append(longest + (shortest - longest) * (1 + math.cos(math.pi * progress)) / 2)
    return rewards


class EasedConciseness:
    """Conciseness that begins to count only when the policy succeeds: first be right, then be brief.

    Its weight is 0 up to a success rate of `begin`, rises in a line, and is 1 from `full` on (shares, 0 to 1). The rate
    is a running mean of `rewards/correctness/mean` as TRL logs it over all workers, so every worker has the same
    weight, and it is kept in checkpoints. Needs `correctness` among the rewards, and `grpo.logging_steps=1`.
    """

    def __init__(
        self, *, target: int, max_length: int, begin: float = 0.5, full: float = 0.9, memory: float = 0.9
    ) -> None:
        """memory: share of the running mean that is kept at each step. Raises RewardError unless begin < full."""
        if not 0 <= begin < full <= 1 or not 0 <= memory < 1:
            raise RewardError(f"begin={begin}, full={full} and memory={memory} must be shares, begin below full")
        self.target, self.max_length = target, max_length
        self.begin, self.full, self.memory = begin, full, memory
        self.success: float | None = None
        self.step = 0

    @property
    def weight(self) -> float:
        """What one unit of conciseness earns now, 0 to 1."""
        rate = 0.0 if self.success is None else self.success
        return min(1.0, max(0.0, (rate - self.begin) / (self.full - self.begin)))

    def __call__(self, completion_ids: Ids, trainer_state: Any = None, **kwargs: Any) -> list[float]:
        """Conciseness times the present weight, for each completion."""
        if trainer_state is not None and trainer_state.log_history:
            self._learn(trainer_state.log_history[-1])
        earned = conciseness(completion_ids, target=self.target, max_length=self.max_length)
        return [self.weight * reward for reward in earned]

    def _learn(self, logged: dict[str, Any]) -> None:
        """Take in the newest step's success rate, once."""
        rate = logged.get("rewards/correctness/mean")
        if rate is None or logged["step"] <= self.step:
            return
        self.step = logged["step"]
        self.success = rate if self.success is None else self.memory * self.success + (1 - self.memory) * rate

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        return {"success": self.success, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Put back what `state_dict` gave."""
        self.success, self.step = state["success"], state["step"]
