"""Rewards for the length of a completion, in tokens of TRL's `completion_ids`.

The soft overlong punishment and the repetition penalty are TRL's own. TRL's cosine reward is not used: it verifies
answers inside the trainer process without a time limit; `cosine_length` grades them in the verifier pool.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from grpo_ray.errors import RewardError
from grpo_ray.rewards.completions import Completion, TokenIds
from grpo_ray.rewards.correctness import accuracy_reward


def soft_overlong(completion_ids: TokenIds, *, max_length: int, buffer: int, **kwargs: Any) -> list[float]:
    """Penalize length near the maximum: -1.0 to 0.0. DAPO's soft overlong punishment (arXiv 2503.14476, eq. 13).

    With L tokens: 0 for L <= max_length - buffer; (max_length - buffer - L) / buffer up to max_length; -1 beyond.

    Args:
        completion_ids: Token ids of each completion.
        max_length: Tokens from which the penalty is -1.0.
        buffer: Tokens over which the penalty grows.

    Raises:
        RewardError: Unless 0 <= buffer <= max_length.
    """
    if not 0 <= buffer <= max_length:
        raise RewardError(f"buffer must be 0 to max_length={max_length} tokens; got {buffer}")
    from trl.rewards import get_soft_overlong_punishment

    punish = get_soft_overlong_punishment(max_completion_len=max_length, soft_punish_cache=buffer)
    return list(punish(completion_ids=completion_ids))


def repetition_penalty(
    completion_ids: TokenIds, *, ngram_size: int = 3, max_penalty: float = -1.0, **kwargs: Any
) -> list[float]:
    """Penalize repeated token n-grams: max_penalty to 0.0 (arXiv 2502.03373, appendix C.2).

    The penalty is max_penalty * (1 - distinct n-grams / all n-grams).

    Raises:
        RewardError: ngram_size is below 1 or max_penalty above 0.
    """
    if ngram_size < 1 or max_penalty > 0:
        raise RewardError(
            f"ngram_size must be at least 1 and max_penalty at most 0; got {ngram_size} and {max_penalty}"
        )
    from trl.rewards import get_repetition_penalty_reward

    return list(get_repetition_penalty_reward(ngram_size, max_penalty)(completion_ids=completion_ids))


def conciseness(completion_ids: TokenIds, *, target: int, max_length: int, **kwargs: Any) -> list[float]:
    """Reward short completions, right or wrong: 0.0 to 1.0. Give it a small weight.

    With L tokens: (max_length - L) / (max_length - target), clamped to 0 and 1.

    Args:
        completion_ids: Token ids of each completion.
        target: Tokens up to which the reward is 1.0.
        max_length: Tokens from which the reward is 0.0.

    Raises:
        RewardError: Unless 0 <= target < max_length.
    """
    if not 0 <= target < max_length:
        raise RewardError(f"target must be at least 0 and below max_length={max_length} tokens; got {target}")
    return [min(1.0, max(0.0, (max_length - len(ids)) / (max_length - target))) for ids in completion_ids]


def cosine_length(
    completions: Sequence[Completion],
    solution: Sequence[str],
    completion_ids: TokenIds,
    *,
    max_length: int,
    right: tuple[float, float] = (1.0, 0.5),
    wrong: tuple[float, float] = (-1.0, -0.5),
    strict: bool = True,
    time_limit: float = 3.0,
    log_metric: Callable[[str, float], None] | None = None,
    **kwargs: Any,
) -> list[float | None]:
    """Reward correctness scaled by length along half a cosine: -1.0 to 1.0 by default (arXiv 2502.03373, appendix C.1).

    With L tokens: longest + (shortest - longest) * (1 + cos(pi * min(L / max_length, 1))) / 2.

    Args:
        completions: One completion per row.
        solution: The dataset's reference answer of each row.
        completion_ids: Token ids of each completion.
        max_length: Tokens at which the reward reaches `longest`.
        right: (shortest, longest): rewards of a right completion of 0 and of max_length tokens. By default a short one
            earns more.
        wrong: The same for a wrong completion. By default a long one loses less, so that longer attempts are not
            punished.
        strict: See `accuracy_reward`; `rewards.strict` of the config.
        time_limit: Seconds for one verdict; `rewards.time_limit` of the config.
        log_metric: See `accuracy_reward`.

    Returns:
        One reward per row; None if the solution cannot be parsed.

    Raises:
        RewardError: max_length is below 1.
    """
    if max_length < 1:
        raise RewardError(f"max_length must be at least 1 token; got {max_length}")
    rewards: list[float | None] = []
    verdicts = accuracy_reward(completions, solution, strict=strict, time_limit=time_limit, log_metric=log_metric)
    for reward, ids in zip(verdicts, completion_ids, strict=True):
        if reward is None:
            rewards.append(None)
            continue
        shortest, longest = right if reward else wrong
        # Clamped: past max_length the cosine would rise again.
        progress = min(len(ids) / max_length, 1.0)
        rewards.append(longest + (shortest - longest) * (1 + math.cos(math.pi * progress)) / 2)
    return rewards


SUCCESS_RATE = "rewards/correctness/mean"
"""TRL's metric that `EasedConciseness` reads."""


class TrainerState(Protocol):
    """The part of transformers' `TrainerState` that `EasedConciseness` reads."""

    log_history: list[dict[str, Any]]


class EasedConciseness:
    """Conciseness weighted by the policy's success rate: 0.0 to 1.0. The policy learns to be right, then to be short.

    reward = weight * conciseness, with weight = (rate - begin) / (full - begin) clamped to 0 and 1. The rate is an
    exponential moving average of `rewards/correctness/mean`, which TRL logs over all workers, so every worker has the
    same weight. It is saved in checkpoints. Needs `correctness` among the rewards, and `grpo.logging_steps=1`.
    """

    def __init__(
        self, *, target: int, max_length: int, begin: float = 0.5, full: float = 0.9, memory: float = 0.9
    ) -> None:
        """Validate and store the settings.

        Args:
            target: See `conciseness`.
            max_length: See `conciseness`.
            begin: Success rate, 0 to 1, up to which the weight is 0.
            full: Success rate, 0 to 1, from which the weight is 1.
            memory: Decay of the moving average: share, 0 to 1, of the old value that is kept at each step.

        Raises:
            RewardError: Unless 0 <= begin < full <= 1 and 0 <= memory < 1.
        """
        if not 0 <= begin < full <= 1 or not 0 <= memory < 1:
            raise RewardError(
                f"begin, full and memory must be shares of 0 to 1, with begin below full and memory below 1;"
                f" got begin={begin}, full={full}, memory={memory}"
            )
        self.target, self.max_length = target, max_length
        self.begin, self.full, self.memory = begin, full, memory
        self.success: float | None = None
        self.step = 0

    @property
    def weight(self) -> float:
        """The present weight of conciseness, 0 to 1; 0 while no success rate is known."""
        rate = 0.0 if self.success is None else self.success
        return min(1.0, max(0.0, (rate - self.begin) / (self.full - self.begin)))

    def __call__(
        self, completion_ids: TokenIds, trainer_state: TrainerState | None = None, **kwargs: Any
    ) -> list[float]:
        """Return the weighted conciseness of each completion, after reading the newest logged success rate."""
        if trainer_state is not None:
            self._update_success(trainer_state.log_history)
        unweighted = conciseness(completion_ids, target=self.target, max_length=self.max_length)
        return [self.weight * reward for reward in unweighted]

    def _update_success(self, history: Sequence[dict[str, Any]]) -> None:
        """Add the newest logged success rate to the moving average, unless it was already added.

        A step that reuses earlier completions logs no rate.
        """
        logged = next((row for row in reversed(history) if row.get(SUCCESS_RATE) is not None), None)
        if logged is None or logged["step"] <= self.step:
            return
        rate = logged[SUCCESS_RATE]
        self.step = logged["step"]
        self.success = rate if self.success is None else self.memory * self.success + (1 - self.memory) * rate

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint (JSON types)."""
        return {"success": self.success, "step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that `state_dict` returned."""
        self.success, self.step = state["success"], state["step"]
