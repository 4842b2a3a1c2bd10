"""Names and descriptions of all metrics.

Run `python scripts/metrics_page.py` after every change of the tables; a unit test compares docs/metrics.md with them.
"""

import math
import re
from collections.abc import Mapping
from typing import Any

from grpo_ray.telemetry.profiler import PHASES

METRICS: dict[str, tuple[str, str]] = {
    "reward/mean": ("reward", "Mean reward of the step's completions, the weighted sum of all reward functions."),
    "reward/std": ("reward_std", "Standard deviation of that reward."),
    "group/equal_share": ("frac_reward_zero_std", "Share of groups with equal rewards; they have no gradient."),
    "group/distinct_share": (
        "group/distinct_share",
        "Share of completions that differ from all earlier ones in their group; the first of a group does not count. 0 "
        "if all completions of each group are the same, 1 if all differ.",
    ),
    "group/rounds": (
        "group/rounds",
        "Rounds in which a step's groups were generated; with grpo.dynamic_sampling only. Metrics of rewards, groups "
        "and completions then cover all that was generated.",
    ),
    "group/signal_share": (
        "group/signal_share",
        "Share of the groups trained on that have signal; with grpo.dynamic_sampling only.",
    ),
    "completion/length_mean": ("completions/mean_length", "Mean length of completions, tokens."),
    "completion/length_max": ("completions/max_length", "Longest completion, tokens."),
    "completion/truncated_share": ("completions/clipped_ratio", "Share of completions cut off at the longest allowed."),
    "policy/entropy": (
        "entropy",
        "Mean entropy of the policy over the tokens that the learner read, nats. With run.kind=sft a mean of "
        "the micro-batches' means, whatever their numbers of tokens.",
    ),
    "policy/kl": ("kl", "Mean divergence from the reference policy, nats; with grpo.beta > 0 only."),
    "policy/clipped_share": ("clip_ratio/region_mean", "Share of tokens whose ratio left the trust region."),
    "learner/loss": (
        "loss",
        "The loss; near zero on-policy, and no measure of success. With run.kind=sft the mean negative log-likelihood "
        "of the demonstrations' tokens, nats.",
    ),
    "learner/token_accuracy": (
        "mean_token_accuracy",
        "Share of the demonstrations' tokens that are the most probable ones; with run.kind=sft only. A mean of the "
        "micro-batches' shares, whatever their numbers of tokens.",
    ),
    "learner/gradient_norm": ("grad_norm", "Norm of the gradient before clipping."),
    "learner/learning_rate": ("learning_rate", "Learning rate of the step."),
    "learner/completions_share": (
        "learner/completions_share",
        "Share of the step's completions that the learner read, forward and backward; the others have no gradient.",
    ),
    "learner/positions_share": (
        "learner/positions_share",
        "Token positions that the learner read, padding included, as a share of those that stock TRL's loss reads.",
    ),
    "learner/tokens_saved": (
        "learner/tokens_saved",
        "Completion tokens of a step, over all workers, that the learner did not have to read.",
    ),
    "engine/logprob_gap_mean": (
        "engine/logprob_gap_mean",
        "Mean gap between the engine's and the learner's log-probabilities of the same tokens, nats. With "
        "rollout.max_staleness, of a few completions of the step's round; a round that samples nothing has none.",
    ),
    "engine/logprob_gap_max": ("engine/logprob_gap_max", "Largest such gap, nats."),
    "engine/logprob_gap_first_turn": (
        "engine/logprob_gap_first_turn",
        "Mean gap of tokens before the first result; with tools or an environment only.",
    ),
    "engine/logprob_gap_later_turns": (
        "engine/logprob_gap_later_turns",
        "Mean gap of tokens after a result. If it is far above the first turn's, engine and learner read different "
        "results.",
    ),
    "engine/count": (
        "engine/count",
        "Dedicated engines that held the step's weights; with engine.placement=dedicated only.",
    ),
    "engine/replaced": (
        "engine/replaced",
        "Dedicated engines that were lost in this launch so far; another is started in the place of each.",
    ),
    "reward/verifier_timeouts": (
        "reward/verifier_timeouts",
        "Mean number of completions per call whose grading hit a limit or crashed; they count as wrong.",
    ),
    "reward/unscorable_share": (
        "reward/unscorable_share",
        "Share of completions without a verdict, because the solution could not be parsed.",
    ),
    "reward/failed_share": (
        "reward/failed_share",
        "Share of completions per call of a judge, or with rewards.isolate of a function, whose reward failed.",
    ),
    "reward/undecided_share": (
        "reward/undecided_share",
        "Share of completions that count as wrong because the form of their answer could not be compared.",
    ),
    **{
        name: (name, text)
        for name, text in {
            "rollout/turns_mean": "Mean number of the policy's turns in a completion. The metrics of `rollout/` exist "
            "only with tools or an environment, except those that name `rollout.max_staleness`; those of turns, "
            "results, cuts by length, losses and rewards also with `rollout.function`.",
            "rollout/turns_max": "Largest number of turns.",
            "rollout/calls_mean": "Mean number of calls of tools, and of answers of an environment, in a completion.",
            "rollout/result_token_share": "Share of the completions' tokens that are results; they have no gradient.",
            "rollout/cut_by_turns_share": "Share of completions ended by `rollout.max_turns`.",
            "rollout/cut_by_length_share": "Share ended by `grpo.max_completion_length` or the engine's context.",
            "rollout/lost_share": "Share whose environment was lost or could not be reset, whose remote sandbox was "
            "unreachable, or that a rollout function marked as `failed`; they are unscorable.",
            "rollout/unrewarded_share": "Share whose `get_reward`, or rollout function, gave no number; they are "
            "unscorable if `environment` is among the rewards.",
            "rollout/call_error_share": "Share of calls that raised an exception; the policy reads it.",
            "rollout/call_timeout_share": "Share of calls that exceeded `rollout.time_limit`.",
            "rollout/call_killed_share": "Share of calls that ended by a crash or a limit of memory, processes, disk.",
            "rollout/call_unknown_share": "Share of calls of tools that do not exist.",
            "rollout/call_unparsed_share": "Share of calls whose arguments are not an object; a turn that was "
            "not read counts as one.",
            "rollout/call_skipped_share": "Share of calls that were not made: beyond `rollout.max_calls`, or after one "
            "of the same turn that had no result.",
            "rollout/call_seconds_mean": "Mean time of a call, seconds.",
        }.items()
    },
    **{
        name: (name, f"{text}; with rollout.max_staleness only.")
        for name, text in {
            "rollout/segments_mean": "Mean number of rounds in which a completion was sampled",
            "rollout/recomputed_share": "Tokens of prompts and earlier segments that the engine read again, as a share "
            "of the tokens sampled",
            "learner/idle_share": "Share of a step's time in which the learner waited for the engine",
            "engine/idle_share": "Share of a step's time in which a worker's engine sampled nothing for training; "
            "waits for tools count as sampling",
            "engine/round_seconds_max": "Longest time of one round of the engine, on any worker, waits for tools "
            "included",
        }.items()
    },
    "engine/ratio_mean": (
        "sampling/importance_sampling_ratio/mean",
        "Mean importance ratio of learner to engine over the tokens that the learner read; 1 when they agree.",
    ),
}
"""Metric -> TRL's name for it, and its description."""

OWN_METRICS: dict[str, str] = {
    "step": "Optimizer steps taken.",
    "heldout/accuracy": "Share of correct completions of held-out problems, or the mean of another `heldout.score`; on "
    "steps with a checkpoint.",
    "heldout/low": "Lower end of its 95 % confidence interval.",
    "heldout/high": "Upper end of that interval.",
    "heldout/reward": "Mean reward of the environment on held-out problems; with `get_reward` only.",
    "heldout/truncated_share": "Share of these completions cut off at the longest allowed.",
    "heldout/pass_at_k": "Probability that at least one of k completions of a problem is correct, or the mean of the "
    "best of k scores if `heldout.score` is not correctness; with several completions per problem only.",
    "heldout/maj_at_k": "Share of problems whose most frequent answer among k completions is correct, if "
    "`heldout.score` is correctness; with several completions per problem only.",
    "learner/skipped_steps": "Steps skipped so far because loss or gradient was not finite; only if there are any.",
    **{f"phase/{phase}": text for phase, text in PHASES.items()},
    "engine/tokens_per_second": "Completion tokens that one worker's engine generates per second of `phase/generate`.",
    "learner/tokens_per_second": "Completion tokens that one worker's learner reads per second of "
    "`phase/forward_backward`.",
    "step/overhead_share": "Share of the time that is neither generation nor forward, backward and optimizer.",
    "step/seconds": "Wall-clock seconds from the last report to this one, all included.",
    "step/completions_per_second": "Completions generated, scored and learned from, per second of that time; one "
    "that is read in several epochs counts once.",
}
"""Metric that TRL does not have -> its description."""


AGE = re.compile(r"rollout/staleness_\d+")
"""Metrics with the share of tokens of each age."""


def rename_metrics(logs: Mapping[str, Any]) -> dict[str, float]:
    """Rename TRL's logs to our metrics; logs without a name of ours and values that are not finite are left out."""
    metrics = {name: logs[trl_name] for name, (trl_name, _) in METRICS.items() if trl_name in logs}
    for key, value in logs.items():
        kind, _, rest = key.partition("/")
        if kind == "rewards":
            name, _, measure = rest.rpartition("/")
            metrics[f"reward/{name}_{measure}"] = value
        elif (kind == "reward" and rest) or (kind in ("rollout", "source") and "/" in rest) or AGE.fullmatch(key):
            metrics[key] = value
    return {name: float(value) for name, value in metrics.items() if value is not None and math.isfinite(float(value))}
