"""Search for exploitable rewards before a run (`grpo-ray check --attack`).

1. Probes are scored (`evaluation/probes.py`): completions that deserve no reward.
2. A policy is trained on the run's own problems and rewards for two minutes, with the same workers and records as a
   run. The completions with the highest rewards are shown.

The trained policy is the run's own if the cluster has GPUs for it, or if the run uses no GPUs and has an embedded
policy, tools, or a policy without a chat template. Otherwise it is the embedded `tiny-arithmetic`, which can write any
text, but begins with short sums in boxes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import ray

from grpo_ray.config.reward_names import is_reward_model
from grpo_ray.config.schema import ClusterConfig, Config, EngineConfig, ModelConfig
from grpo_ray.config.sources import EMBEDDED_POLICIES
from grpo_ray.data.stream import open_splits
from grpo_ray.driver.cluster.connection import connect
from grpo_ray.driver.preflight.audit import call_rewards
from grpo_ray.driver.preflight.overlong import PolicyTokenizer
from grpo_ray.driver.trial import constant_rate, run_trial, trial_run
from grpo_ray.errors import ConfigError
from grpo_ray.evaluation.probes import PROBLEMS, ProbeReport, score_probes
from grpo_ray.models.plain_prompts import uses_plain_prompts
from grpo_ray.resilience.ray_internals import has_autoscaler
from grpo_ray.rewards.registry import needs_solutions
from grpo_ray.storage.jsonl import read_metrics
from grpo_ray.storage.records.rollout_files import read_steps
from grpo_ray.storage.run_folder import RunFolder
from grpo_ray.storage.uris import redact_credentials

MAX_STEPS = 10_000
"""Step limit of the training, so high that the time limit ends the training first."""
MAX_LENGTH = 128
"""Longest completion of the embedded policy, tokens."""
MAX_PROBLEMS = 2_000
"""Problems of each source that the policy is trained on."""
MAX_HELDOUT = 32
"""Problems of each held-out set that the policy is measured on. Several, because overlong prompts are left out."""
LEARNING_RATE = 1e-3
"""Learning rate of the embedded policy."""
KEPT_TRL_FIELDS = frozenset({"reward_weights", "scale_rewards", "multi_objective_aggregation"})
"""Fields of TRL that belong to the rewards, and not to the run's own policy."""
SHOWN = 8
"""Completions that are shown."""
WINDOW = 5
"""Number of first steps, and of last steps, whose means are compared."""


@dataclass(frozen=True)
class PaidCompletion:
    """Completion of the last steps, with its reward."""

    reward: float
    """Combined reward."""
    step: int
    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class AttackReport:
    """Result of the training against a run's rewards."""

    policy: str
    """Policy that was trained, as in `model.path`, without credentials."""
    steps: int
    first: Mapping[str, float]
    """Means over the first `WINDOW` steps: `reward`, `length` of completions in tokens, and `correctness` if the run
    has this reward."""
    last: Mapping[str, float]
    """The same over the last steps."""
    completions: tuple[PaidCompletion, ...]
    """Recorded completions of the last third of the steps with the highest rewards, highest first; equal texts count
    once."""
    folder: str
    """Run folder of the attack, for `grpo-ray report`."""
    stopped: str | None
    """Name of the signal that stopped the training before its time limit; None if none did."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON's types."""
        return asdict(self)


def plan_attack(config: Config) -> Config:
    """Return the config of the attack's training. Ray must be connected.

    Raises:
        ConfigError: neither the run's own policy nor the embedded one can be trained here.
    """
    connect(config)
    tokenizer = PolicyTokenizer(config.model.path, config.model.trust_remote_code).load()
    gpus = config.cluster.max_workers if has_autoscaler() else int(ray.cluster_resources().get("GPU", 0))
    gpus -= int(config.reward_model_gpus == 1)  # of the reward models
    return attack_config(config, gpus=gpus, has_plain_prompts=uses_plain_prompts(tokenizer))


def attack_config(config: Config, *, gpus: int, has_plain_prompts: bool) -> Config:
    """Return the config of the attack's training.

    Args:
        gpus: GPUs that the cluster has, or can get.
        has_plain_prompts: the run's policy has no chat template.

    Raises:
        ConfigError: neither the run's own policy nor the embedded one can be trained with these GPUs.
    """
    data = replace(
        config.data,
        limit=min(config.data.limit or MAX_PROBLEMS, MAX_PROBLEMS),
        heldout_limit=min(config.data.heldout_limit or MAX_HELDOUT, MAX_HELDOUT),
    )
    run = replace(trial_run(config, "attack"), measure="inline")
    steps = max(1, MAX_STEPS // config.steps_per_batch) * config.steps_per_batch
    grpo = replace(config.grpo, max_steps=steps, save_steps=steps, logging_steps=1, trl=constant_rate(config.grpo))
    own = replace(config, run=run, data=data, grpo=grpo)
    needs_own = config.rollout.has_conversations or has_plain_prompts
    if not config.cluster.use_gpu and (needs_own or config.model.path in EMBEDDED_POLICIES):
        return own
    if config.cluster.use_gpu and (fitting := _with_workers(own, gpus)) is not None:
        return fitting
    if needs_own and config.cluster.use_gpu:
        kind = "with tools or environments" if config.rollout.has_conversations else "of plain text"
        raise ConfigError(
            f"check --attack trains the policy itself in a run {kind}, and {config.model.path} needs GPUs, of which "
            f"this cluster has {gpus}; run it where they are"
        )
    grpo = replace(
        grpo,
        prompts_per_step=8,
        num_generations=8,
        max_steps=MAX_STEPS,
        save_steps=MAX_STEPS,
        steps_per_generation=1,
        epochs=1,
        micro_batch_size=None,
        tokens_per_micro_batch=None,
        learning_rate=LEARNING_RATE,
        max_completion_length=min(config.grpo.max_completion_length, MAX_LENGTH),
        dynamic_sampling=0,
        trl={name: value for name, value in grpo.trl.items() if name in KEPT_TRL_FIELDS},
    )
    return replace(
        own,
        run=replace(run, from_checkpoint=None),
        data=replace(data, max_prompt_length=None, overlong_prompts="drop"),
        grpo=grpo,
        cluster=ClusterConfig(num_workers=min(2, config.cluster.max_workers)),
        model=ModelConfig(),
        engine=EngineConfig(),
        # The embedded policy lacks the tokens of most forms.
        rollout=replace(config.rollout, structured_outputs=None, max_staleness=0, anchor="proximal"),
    )


def _with_workers(config: Config, gpus: int) -> Config | None:
    """Return a config with as many workers as GPUs, at most its own number; None if no such number is allowed."""
    for workers in range(min(gpus, config.cluster.max_workers), 0, -1):
        try:
            return replace(config, cluster=replace(config.cluster, num_workers=workers))
        except ConfigError:  # the number does not divide the step, or is no multiple of an engine's GPUs
            continue
    return None


def probe_rewards(config: Config, columns: Sequence[str]) -> tuple[ProbeReport, ...]:
    """Score the probes on the first problems of each source.

    Sources with a reward model or an environment's reward are left out, because reward models and environments run in
    training only.

    Args:
        columns: columns that occur in any training problem; rewards receive all of them, as in training.

    Raises:
        RewardError: a reward cannot be loaded, or fails.
    """
    connect(config)
    training, _ = open_splits(config, partial(needs_solutions, config))
    tokenizer = PolicyTokenizer(config.model.path, config.model.trust_remote_code).load()
    reports = []
    for source, split in training.items():
        names = config.rewards_of(source)
        problems = list(islice(replace(split, columns=tuple(columns)).read(), PROBLEMS))
        if not problems or "environment" in names or any(map(is_reward_model, names)):
            continue
        failure = f"a reward fails on a completion without merit{f' of {source}' if source else ''}"
        reports.append(call_rewards(score_probes, config, source, problems, tokenizer, failure=failure))
    return tuple(reports)


def train_against(config: Config, planned: Config, seconds: float) -> AttackReport:
    """Train a policy against the rewards of a run.

    Args:
        config: config of the run.
        planned: config of the training, from `plan_attack`.
        seconds: duration of the training, from the first step.

    Raises:
        GrpoRayError: the trial was refused, or its workers failed.
    """
    trial = run_trial(planned, config.run, seconds)
    rows = list(read_metrics(trial.folder))
    steps = int(rows[-1]["step"]) if rows else 0
    rewarded = [row for row in rows if "reward/mean" in row]
    return AttackReport(
        policy=redact_credentials(planned.model.path),
        steps=steps,
        first=_means(rewarded[:WINDOW]),
        last=_means(rewarded[-WINDOW:]),
        completions=paid_completions(trial.folder, steps),
        folder=trial.folder.uri,
        stopped=trial.stopped,
    )


def _means(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    names = {"reward/mean": "reward", "completion/length_mean": "length", "reward/correctness_mean": "correctness"}
    values = {short: [row[name] for row in rows if name in row] for name, short in names.items()}
    return {short: sum(found) / len(found) for short, found in values.items() if found}


def paid_completions(folder: RunFolder, steps: int) -> tuple[PaidCompletion, ...]:
    """Return the recorded completions of the last third of the steps with the highest rewards, each text once."""
    table = read_steps(folder, first=1 + 2 * steps // 3, samples_only=True, with_texts=True)
    paid = [
        PaidCompletion(reward, row["step"], row["prompt"], text)
        for row in table.to_pylist()
        for reward, text in zip(row["rewards"], row["completions"], strict=True)
        if reward == reward  # not NaN
    ]
    best: dict[str, PaidCompletion] = {}
    for each in sorted(paid, key=lambda each: (-each.reward, -each.step)):
        best.setdefault(each.completion, each)
    return tuple(best.values())[:SHOWN]
