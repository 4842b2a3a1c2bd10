"""From the trainer to Ray Train: metrics on every log, a checkpoint on every save.

Ray's own `RayTrainReportCallback` reports on save only. This one extends its idea: `ray.train.report` is called
exactly once for each step that is logged or saved, by every worker, since it is a barrier.
"""

import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray.train
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_ray.checkpoint import checkpoint_name, save_reward_states
from grpo_ray.ledger import Ledger
from grpo_ray.storage import RunFolder

METRICS: dict[str, tuple[str, str]] = {
    "reward/mean": ("reward", "Mean reward of the step's completions, all reward functions together."),
    "reward/std": ("reward_std", "Standard deviation of that reward."),
    "group/equal_share": ("frac_reward_zero_std", "Share of groups with equal rewards: no gradient comes of them."),
    "completion/length_mean": ("completions/mean_length", "Mean length of completions, tokens."),
    "completion/length_max": ("completions/max_length", "Longest completion, tokens."),
    "completion/truncated_share": ("completions/clipped_ratio", "Share of completions cut off at the longest allowed."),
    "policy/entropy": ("entropy", "Mean entropy of the policy over the completions' tokens, nats."),
    "policy/kl": ("kl", "Mean divergence from the reference, nats; there with grpo.beta > 0."),
    "policy/clipped_share": ("clip_ratio/region_mean", "Share of tokens whose ratio left the trust region."),
    "learner/loss": ("loss", "The loss; near zero on-policy, and no measure of success."),
    "learner/gradient_norm": ("grad_norm", "Norm of the gradient before clipping."),
    "learner/learning_rate": ("learning_rate", "Learning rate of the step."),
    "engine/logprob_gap_mean": (
        "engine/logprob_gap_mean",
        "Mean gap between engine's and learner's log-probabilities of the same tokens, nats (law 4).",
    ),
    "engine/logprob_gap_max": ("engine/logprob_gap_max", "Largest such gap, nats."),
    "phase/score": ("phase/score", "Seconds of a step that scoring took after the last completion was there."),
    "reward/verifier_timeouts": (
        "reward/verifier_timeouts",
        "Completions of one call, on average, whose verdict hit a time or memory limit; they count as wrong.",
    ),
    "reward/unscorable_share": (
        "reward/unscorable_share",
        "Share of completions without a verdict, because the solution is not understood.",
    ),
    "engine/ratio_mean": (
        "sampling/importance_sampling_ratio/mean",
        "Mean importance ratio of learner to engine; 1 when they agree.",
    ),
}
"""Metric -> TRL's name for it, and what it means."""

OWN_METRICS = {
    "step": "Optimizer steps taken.",
    "heldout/accuracy": "Share of held-out problems solved greedily; on steps with a checkpoint.",
    "step/seconds": "Wall-clock seconds from the last report to this one, all included.",
    "step/completions_per_second": "Completions generated, scored and learned from, per second of that time.",
}
"""Metrics that TRL does not have. A reward function's own are `reward/<name>_mean` and `reward/<name>_std`."""


def rename(logs: dict[str, Any]) -> dict[str, float]:
    """TRL's logs under our names; what has no name of ours is left out, and so is what is not a finite number."""
    metrics = {ours: logs[theirs] for ours, (theirs, _) in METRICS.items() if theirs in logs}
    for key, value in logs.items():
        kind, _, rest = key.partition("/")
        if kind == "rewards":
            name, _, measure = rest.rpartition("/")
            metrics[f"reward/{name}_{measure}"] = value
        elif kind == "reward" and rest:
            metrics[key] = value
    return {k: float(v) for k, v in metrics.items() if v is not None and math.isfinite(float(v))}


class ReportCallback(TrainerCallback):
    """Reports to Ray Train on each logging step, and with a checkpoint on each save."""

    def __init__(
        self,
        folder: RunFolder,
        completions_per_step: int,
        measure: Callable[[], float],
        ledger_at: Callable[[int], Ledger],
        reward_states: Callable[[], dict[str, Any]] = dict,
        say: Callable[[str], None] = lambda phase: None,
    ):
        """
        measure: gives the held-out accuracy; called on every worker at each save.
        ledger_at: gives the ledger after a number of steps.
        reward_states: gives the state of each reward that has one, for the checkpoint.
        """
        self.folder = folder
        self.completions_per_step = completions_per_step
        self.measure = measure
        self.ledger_at = ledger_at
        self.reward_states = reward_states
        self.say = say
        self._waiting: dict[str, float] = {}
        self._reported_step = 0
        self._reported_at = time.perf_counter()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._reported_step, self._reported_at = state.global_step, time.perf_counter()
        self.say("training")

    def on_log(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, logs: dict[str, Any], **kwargs: Any
    ) -> None:
        if "train_runtime" in logs:  # TRL's summary at the end; every step has been reported by then
            return
        if control.should_save:  # on_save follows, and one step has one report
            self._waiting = rename(logs)
        else:
            ray.train.report(self._row(state, rename(logs)))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        accuracy = self.measure()
        local = Path(args.output_dir, f"checkpoint-{state.global_step}")
        context = ray.train.get_context()
        names = [checkpoint_name(self.folder, state.global_step)] if context.get_world_rank() == 0 else [""]
        if context.get_world_size() > 1:
            dist.broadcast_object_list(names)  # one name, chosen before any worker begins to upload
        if context.get_world_rank() == 0:
            self.ledger_at(state.global_step).save(local)
        save_reward_states(local, context.get_world_rank(), self.reward_states())
        metrics = self._waiting | ({"heldout/accuracy": accuracy} if math.isfinite(accuracy) else {})
        self._waiting = {}
        # Ray merges the workers' folders into one: rank 0 has the model, each has its own random state.
        ray.train.report(
            self._row(state, metrics),
            checkpoint=ray.train.Checkpoint.from_directory(str(local)),
            checkpoint_dir_name=names[0],
            delete_local_checkpoint_after_upload=True,
        )

    def _row(self, state: TrainerState, metrics: dict[str, float]) -> dict[str, float]:
        now = time.perf_counter()
        seconds, steps = now - self._reported_at, state.global_step - self._reported_step
        self._reported_at, self._reported_step = now, state.global_step
        return {
            "step": state.global_step,
            **metrics,
            "step/seconds": seconds,
            "step/completions_per_second": steps * self.completions_per_step / seconds,
        }
