"""Advantages of completions: the weights of their policy gradients, computed from the rewards of a step's groups.

`grpo.advantages` names a function of `ADVANTAGES`, or one of the user's. It receives the rewards of whole groups from
all workers, so its result does not depend on the number of workers. TRL's function is the default; its settings are
`grpo.scale_rewards` and `grpo.multi_objective_aggregation`.

A completion with an advantage of 0 has no policy gradient, so exact savings leave it out, whatever the function is.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from trl.trainer.utils import nanstd

from grpo_ray.config.import_path import import_callable
from grpo_ray.errors import ConfigError

EPSILON = 1e-4
"""Added to a standard deviation before a division, as in TRL."""


class Advantages(NamedTuple):
    """Advantages of N groups of G completions."""

    values: torch.Tensor
    """(N, G), 0 where no reward applies."""
    zero_std: torch.Tensor
    """(N, G) bool, True in groups without signal: the standard deviation that scales the rewards is 0; for functions
    other than TRL's, all advantages of the group are 0."""


Advantage = Callable[[torch.Tensor, torch.Tensor], Advantages]
"""Function of the rewards, (N, G, R), with one column for each reward function and NaN where it does not apply, and of
the reward functions' weights, (R,)."""


def combine_rewards(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each completion's rewards, as TRL computes it.

    Args:
        rewards: (..., R), one column for each reward function; NaN where it does not apply.
        weights: (R,)

    Returns:
        (...), NaN where no reward function applies.
    """
    total = (rewards * weights.to(rewards.device)).nansum(dim=-1)
    total[rewards.isnan().all(dim=-1)] = torch.nan
    return total


@dataclass(frozen=True)
class CenteredSum:
    """TRL's `sum_then_normalize`: the weighted sum of the rewards minus its mean over the group (GRPO, arXiv
    2402.03300), divided by a standard deviation plus 1e-4."""

    scale: str
    """`group`: divide by the group's standard deviation; `batch`: by that of the step; `none`: do not divide."""

    def __call__(self, rewards: torch.Tensor, weights: torch.Tensor) -> Advantages:
        total = combine_rewards(rewards, weights)
        centered = total - torch.nanmean(total, dim=1, keepdim=True)
        std = _std_of_all(total) if self.scale == "batch" else nanstd(total, dim=1, keepdim=True).expand_as(total)
        scaled = centered if self.scale == "none" else centered / (std + EPSILON)
        return Advantages(scaled.nan_to_num(nan=0.0), _is_zero(std))


def sum_of_normalized(rewards: torch.Tensor, weights: torch.Tensor) -> Advantages:
    """Normalize each reward in its group, sum them up, and normalize the sum over the step (GDPO, arXiv 2601.05242).

    TRL's `normalize_then_sum`.
    """
    mean = torch.nanmean(rewards, dim=1, keepdim=True)
    normalized = (rewards - mean) / (nanstd(rewards, dim=1, keepdim=True) + EPSILON)
    total = (normalized * weights.to(rewards.device)).nansum(dim=-1)
    total[rewards.isnan().all(dim=-1)] = torch.nan
    std = _std_of_all(total)
    return Advantages(((total - torch.nanmean(total)) / (std + EPSILON)).nan_to_num(nan=0.0), _is_zero(std))


def trl_advantages(scale_rewards: str, aggregation: str) -> Advantage:
    """Return TRL's advantages for its two settings."""
    return sum_of_normalized if aggregation == "normalize_then_sum" else CenteredSum(scale_rewards)


def leave_one_out(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the combined reward minus the mean of the group's other completions (RLOO, arXiv 2402.14740)."""
    total = combine_rewards(rewards, weights)
    known = (~total.isnan()).sum(dim=1, keepdim=True)
    return (total - torch.nanmean(total, dim=1, keepdim=True)) * known / (known - 1)


def centered(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the combined reward minus the group's mean, not divided by anything (Dr. GRPO, arXiv 2503.20783)."""
    total = combine_rewards(rewards, weights)
    return total - torch.nanmean(total, dim=1, keepdim=True)


def normalized_over_step(rewards: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the combined reward minus the step's mean, divided by the step's standard deviation plus 1e-4.

    REINFORCE++ (arXiv 2501.03262). A group of equal rewards has a gradient.
    """
    total = combine_rewards(rewards, weights)
    return (total - torch.nanmean(total)) / (nanstd(total) + EPSILON)


ADVANTAGES: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "rloo": leave_one_out,
    "dr_grpo": centered,
    "reinforce_pp": normalized_over_step,
}
"""Name -> function of the rewards, (N, G, R), and of the weights of the reward functions, (R,). It returns advantages,
(N, G); NaN becomes 0. A user's function has the same arguments and result."""


def load_advantage(name: str, scale_rewards: str, aggregation: str) -> Advantage:
    """Return the function that `grpo.advantages` names; the last two arguments are TRL's settings.

    Raises:
        ConfigError: a user's function cannot be imported, or does not return a number for each completion.
    """
    if name == "grpo":
        return trl_advantages(scale_rewards, aggregation)
    function = ADVANTAGES.get(name) or import_callable(name, "grpo.advantages")

    def compute(rewards: torch.Tensor, weights: torch.Tensor) -> Advantages:
        values = function(rewards, weights)
        if not isinstance(values, torch.Tensor) or values.shape != rewards.shape[:2]:
            got = tuple(values.shape) if isinstance(values, torch.Tensor) else type(values).__name__
            raise ConfigError(
                f"grpo.advantages: {name} must return a tensor of shape (groups, completions of a group), here "
                f"{tuple(rewards.shape[:2])}; got {got}"
            )
        known = values.to(rewards).nan_to_num(nan=0.0)
        return Advantages(known, (known == 0).all(dim=1, keepdim=True).expand_as(known))

    return compute


def try_advantage(name: str, groups: int, completions: int, functions: int) -> None:
    """Call the function that `grpo.advantages` names with random rewards of a step's size.

    Raises:
        ConfigError: as `load_advantage`.
    """
    rewards = torch.rand(groups, completions, functions, generator=torch.Generator().manual_seed(0))
    load_advantage(name, "group", "sum_then_normalize")(rewards, torch.ones(functions))


def _std_of_all(values: torch.Tensor) -> torch.Tensor:
    return nanstd(values).expand_as(values)


def _is_zero(std: torch.Tensor) -> torch.Tensor:
    return torch.isclose(std, torch.zeros_like(std))
