"""Metrics of a round of completions over all workers, under TRL's names."""

from collections import defaultdict
from collections.abc import Sequence

import torch
from trl.trainer.utils import nanstd

from grpo_ray.data.problem import SOURCE
from grpo_ray.learner.advantages import combine_rewards
from grpo_ray.learner.collectives import Workers
from grpo_ray.learner.rollouts.dynamic_sampling import rewards_differ
from grpo_ray.learner.rollouts.rollout import Rows


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


def source_metrics(
    rows: Rows,
    lengths: Sequence[int],
    names: Sequence[str],
    rewards: torch.Tensor,
    weights: torch.Tensor,
    num_generations: int,
    workers: Workers,
) -> dict[str, float]:
    """Compute the metrics of each source of a mixture over all workers; collective; empty for a single dataset.

    Args:
        rows: (B,) of this worker, groups of `num_generations`.
        lengths: (B,), tokens of the policy in each completion.
        names: (R,), names of the reward functions.
        rewards: (B, R), rewards of this worker's completions; NaN where one does not apply.
        weights: (R,)
    """
    if SOURCE not in rows[0]:
        return {}
    sums: dict[str, dict[str, tuple[float, int]]] = defaultdict(dict)
    totals = combine_rewards(rewards, weights)
    source_of_row = [row[SOURCE] for row in rows]
    for source in dict.fromkeys(source_of_row):
        places = [place for place, each in enumerate(source_of_row) if each == source]
        own, total = rewards[places], totals[places]
        groups = total.view(-1, num_generations).tolist()
        equal = sum(not rewards_differ(group) for group in groups)
        values = {"reward_mean": total, **{f"{name}_mean": own[:, index] for index, name in enumerate(names)}}
        sums[source] = {name: _sum_and_count(column) for name, column in values.items()}
        sums[source] |= {
            "equal_share": (equal, len(groups)),
            "length_mean": (sum(lengths[place] for place in places), len(places)),
            "problems_share": (len(places), 0),
            "epoch": (max(rows[place]["epoch"] for place in places), 1),
        }
    of_workers = workers.gather_objects(dict(sums))
    completions = workers.count * len(rows)
    metrics = {}
    for source in sorted({source for each in of_workers for source in each}):
        parts = [each[source] for each in of_workers if source in each]
        for name in parts[0]:
            total_sum, count = (sum(part[name][place] for part in parts) for place in (0, 1))
            if name == "problems_share":
                count = completions
            if name == "epoch":
                total_sum, count = max(part[name][0] for part in parts), 1
            if count:
                metrics[f"source/{source}/{name}"] = total_sum / count
    return metrics


def _sum_and_count(column: torch.Tensor) -> tuple[float, int]:
    """Return sum and number of the values that are not NaN."""
    return torch.nansum(column.double()).item(), int((~column.isnan()).sum())
