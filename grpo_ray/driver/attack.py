"""Attack on a run's rewards before the run: what a policy will find (`grpo-ray check --attack`).

First probes are scored (`evaluation/probes.py`): completions that no honest policy would write. Then a policy is
trained against the rewards for two minutes, on the run's own problems and through the whole system, and the completions
that pay most are shown. The policy is the run's own where the cluster has the GPUs for it, or if it is an embedded one;
elsewhere it is the embedded `tiny-arithmetic`, which can write any text, but begins with short sums in boxes.
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
from grpo_ray.data.problem import Problem
from grpo_ray.data.stream import open_splits
from grpo_ray.driver.cluster.connection import connect
from grpo_ray.driver.preflight.audit import call_rewards
from grpo_ray.driver.preflight.overlong import PolicyTokenizer
from grpo_ray.driver.trial import run_trial, trial_run
from grpo_ray.errors import ConfigError
from grpo_ray.evaluation.probes import PROBLEMS, ProbeReport, score_probes
from grpo_ray.rewards.registry import needs_solutions
from grpo_ray.storage.jsonl import read_metrics
from grpo_ray.storage.records.rollout_files import read_steps
from grpo_ray.storage.run_folder import RunFolder

SECONDS = 120.0
"""Time of training against the rewards."""
MAX_STEPS = 10_000
"""Steps that no attack reaches; the learning rate falls over them."""
MAX_LENGTH = 128
"""Longest completion of the embedded policy, tokens."""
MAX_PROBLEMS = 2_000
"""Problems of each source that the policy is trained on."""
LEARNING_RATE = 1e-3
"""Learning rate of the embedded policy."""
KEPT_TRL_FIELDS = frozenset({"reward_weights", "scale_rewards", "multi_objective_aggregation"})
"""Fields of TRL that belong to the rewards, and not to the run's own policy."""
SHOWN = 8
"""Completions that are shown."""
WINDOW = 5
"""First and last steps whose means are compared."""


@dataclass(frozen=True)
class PaidCompletion:
    """A completion of the last steps, and what it earned."""

    reward: float
    """Combined reward."""
    step: int
    prompt: str
    completion: str


@dataclass(frozen=True, kw_only=True)
class AttackReport:
    """Result of an attack."""

    probes: tuple[ProbeReport, ...]
    """Probes of each source."""
    policy: str
    """Policy that was trained, as in `model.path`."""
    steps: int
    first: Mapping[str, float]
    """Means over the first `WINDOW` steps: `reward`, `length` of completions in tokens, and `correctness` if the run
    has this reward."""
    last: Mapping[str, float]
    """The same over the last steps."""
    completions: tuple[PaidCompletion, ...]
    """Completions of the last third of the steps that paid most, the best first; equal texts count once."""
    folder: str
    """Run folder of the attack, for `grpo-ray report`."""

    def to_dict(self) -> dict[str, Any]:
        """Return the report in JSON's types."""
        return asdict(self)


def attack(config: Config, seconds: float = SECONDS) -> AttackReport:
    """Score the probes, and train a policy against the rewards. Ray must be connected.

    Args:
        seconds: time of training, from the first step.

    Raises:
        ConfigError: the policy that is trained has no tools, and the run needs them.
        RewardError: a reward cannot be loaded, or fails.
        GrpoRayError: the trial was refused, or its workers failed.
    """
    probes = probe_rewards(config)
    trial = attack_config(config, can_use_gpus=_has_gpus(config))
    folder, _ = run_trial(trial, seconds)
    first, last, steps = _changes(folder)
    return AttackReport(
        probes=probes,
        policy=trial.model.path,
        steps=steps,
        first=first,
        last=last,
        completions=paid_completions(folder, steps),
        folder=folder.uri,
    )


def _has_gpus(config: Config) -> bool:
    """Return True if the run has GPUs and the cluster, which is connected if need be, has one for each worker."""
    if not config.cluster.use_gpu:
        return False
    connect(config)
    return ray.cluster_resources().get("GPU", 0) >= config.cluster.min_workers


def attack_config(config: Config, *, can_use_gpus: bool) -> Config:
    """Return the config of the attack's training.

    Args:
        can_use_gpus: the cluster has the GPUs of the run.

    Raises:
        ConfigError: the run has tools or environments, and its own policy cannot be trained here.
    """
    run = trial_run(config, "attack")
    data = replace(config.data, limit=min(config.data.limit or MAX_PROBLEMS, MAX_PROBLEMS), heldout_limit=1)
    grpo = replace(config.grpo, max_steps=MAX_STEPS, save_steps=MAX_STEPS, logging_steps=1)
    if can_use_gpus or (not config.cluster.use_gpu and config.model.path in EMBEDDED_POLICIES):
        return replace(config, run=run, data=data, grpo=grpo)
    if config.rollout.has_conversations:
        raise ConfigError(
            f"check --attack trains the policy itself in a run with tools or environments, and {config.model.path} "
            "needs GPUs, which this cluster lacks; run it where they are"
        )
    workers = min(2, config.cluster.max_workers)
    grpo = replace(
        grpo,
        prompts_per_step=8,
        num_generations=8,
        steps_per_generation=1,
        epochs=1,
        micro_batch_size=None,
        tokens_per_micro_batch=None,
        learning_rate=LEARNING_RATE,
        max_completion_length=min(config.grpo.max_completion_length, MAX_LENGTH),
        trl={name: value for name, value in config.grpo.trl.items() if name in KEPT_TRL_FIELDS},
    )
    return replace(
        config,
        run=run,
        data=replace(data, max_prompt_length=None, overlong_prompts="drop"),
        grpo=grpo,
        cluster=ClusterConfig(num_workers=workers),
        model=ModelConfig(),
        engine=EngineConfig(),
    )


def probe_rewards(config: Config) -> tuple[ProbeReport, ...]:
    """Score the probes on the first problems of each source.

    Raises:
        RewardError: a reward cannot be loaded, or fails.
    """
    connect(config)
    training, _ = open_splits(config, partial(needs_solutions, config))
    tokenizer = PolicyTokenizer(config.model.path, config.model.trust_remote_code).load()
    reports = []
    for source, split in training.items():
        names = config.rewards_of(source)
        if "environment" in names or any(map(is_reward_model, names)):
            continue  # given by what runs in the workers only
        first: list[Problem] = list(islice(split.read(), PROBLEMS))
        if not first:
            continue
        columns = sorted({name for problem in first for name in problem.columns})
        problems = [problem.with_columns(columns) for problem in first]
        failure = f"a reward fails on a completion without merit{f' of {source}' if source else ''}"
        reports.append(call_rewards(score_probes, config, source, problems, tokenizer, failure=failure))
    return tuple(reports)


def _changes(folder: RunFolder) -> tuple[dict[str, float], dict[str, float], int]:
    """Return means over the first and the last steps, and the number of steps."""
    names = {"reward/mean": "reward", "completion/length_mean": "length", "reward/correctness_mean": "correctness"}
    rows = [row for row in read_metrics(folder) if "reward/mean" in row]

    def means(part: Sequence[Mapping[str, Any]]) -> dict[str, float]:
        values = {short: [row[name] for row in part if name in row] for name, short in names.items()}
        return {short: sum(found) / len(found) for short, found in values.items() if found}

    return means(rows[:WINDOW]), means(rows[-WINDOW:]), len(rows)


def paid_completions(folder: RunFolder, steps: int) -> tuple[PaidCompletion, ...]:
    """Return the best paid of the completions that were recorded in the last third of the steps, without repetition."""
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
