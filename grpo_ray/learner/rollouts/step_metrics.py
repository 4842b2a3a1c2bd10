"""Metrics of a round of completions over all workers, under TRL's names."""

from collections.abc import Sequence

import torch
from trl.trainer.utils import nanstd

from grpo_ray.learner.advantages import combine_rewards
from grpo_ray.learner.collectives import Workers


def length_metrics(lengths: Sequence[int], truncated: Sequence[bool], workers: Workers) -> dict[str, float]:
    """Compute mean, minimum and maximum length of all completions and of those that were not cut off; collective.

    Args:
        lengths: (B,), tokens of the policy in each completion of this worker.
        truncated: (B,), True for those that were cut off.
    """
    own = torch.tensor([lengths, truncated], device=workers.device)
    all_lengths, all_truncated = workers.gather(own.flatten()).view(-1, *own.shape).unbind(dim=1)
    is_cut, measured = all_truncated.flatten().bool(), all_lengths.flatten().float()
    ended = measured[~is_cut] if (~is_cut).any() else measured.new_zeros(1)
    return {
        "completions/mean_length": measured.mean().item(),
        "completions/min_length": measured.min().item(),
        "completions/max_length": measured.max().item(),
        "completions/clipped_ratio": is_cut.float().mean().item(),
        "completions/mean_terminated_length": ended.mean().item(),
        "completions/min_terminated_length": ended.min().item(),
        "completions/max_terminated_length": ended.max().item(),
    }


def reward_metrics(names: Sequence[str], rewards: torch.Tensor, weights: torch.Tensor) -> dict[str, float]:
    """Compute mean and standard deviation of each reward and of their weighted sum.

    Args:
        names: (R,), names of the reward functions.
        rewards: (W B, R), rewards of all workers' completions; NaN where one does not apply.
        weights: (R,)
    """
    metrics = {}
    for name, column in zip(names, rewards.unbind(dim=1), strict=True):
        metrics[f"rewards/{name}/mean"] = torch.nanmean(column).item()
        metrics[f"rewards/{name}/std"] = nanstd(column).item()
    total = combine_rewards(rewards, weights)
    return metrics | {"reward": torch.nanmean(total).item(), "reward_std": nanstd(total).item()}
