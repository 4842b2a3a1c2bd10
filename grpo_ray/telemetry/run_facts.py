"""Settings of a run by which its metrics are judged, from its config or from the file that recorded it.

A recorded config may hold anything: a field that is missing or malformed counts as its default.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from grpo_ray.config.benchmarks import find_benchmark
from grpo_ray.config.checks import changes_difficulty
from grpo_ray.config.fields import type_adapter
from grpo_ray.config.reward_names import derived_score, score_noun
from grpo_ray.config.schema import DEFAULT_LOGPROB_TOLERANCE, GrpoConfig, HealthConfig
from grpo_ray.storage.numbers import to_bounded

if TYPE_CHECKING:
    from grpo_ray.config.schema import Config


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """Settings of a run that thresholds and rates refer to."""

    max_completion_length: int
    """Longest completion allowed, tokens."""
    logprob_tolerance: float
    """Gap between engine and learner at which the run stops, nats."""
    completions_per_call: float
    """Most completions that one call of a reward function gets."""
    has_equal_difficulty: bool = True
    """False if problems are chosen by earlier rewards."""
    rows_per_batch: int = 1
    """Rows of metrics of one generation batch: its optimizer steps, at `grpo.logging_steps`."""
    heldout_noun: str = "accuracy"
    """Word for the measure of held-out completions."""

    @staticmethod
    def of(config: "Config") -> "RunFacts":
        """Return the facts of a config."""
        tolerance = config.engine.logprob_tolerance
        return RunFacts(
            max_completion_length=config.grpo.max_completion_length,
            logprob_tolerance=DEFAULT_LOGPROB_TOLERANCE[config.dtype] if tolerance is None else tolerance,
            completions_per_call=config.sizes.completions_per_generation / config.cluster.min_workers,
            has_equal_difficulty=not changes_difficulty(config),
            rows_per_batch=math.ceil(config.steps_per_batch / config.grpo.logging_steps),
            heldout_noun=score_noun(config.heldout_score),
        )

    @staticmethod
    def recorded(config: Mapping[str, Any]) -> "RunFacts":
        """Return the facts of a recorded config: section -> fields."""
        model, cluster, data, engine = (_section(config, name) for name in ("model", "cluster", "data", "engine"))
        grpo = _section(config, "grpo")

        def size(name: str) -> float:
            value = to_bounded(grpo.get(name))
            return value if value is not None and value >= 1 else float(getattr(GrpoConfig, name))

        tolerance = to_bounded(engine.get("logprob_tolerance"))
        if tolerance is None:
            dtype = model.get("dtype") or ("bfloat16" if cluster.get("use_gpu") else "float32")
            tolerance = DEFAULT_LOGPROB_TOLERANCE.get(str(dtype), DEFAULT_LOGPROB_TOLERANCE["bfloat16"])
        workers = cluster.get("num_workers")
        least_workers = to_bounded(workers[0] if isinstance(workers, list) and workers else workers)
        completions = math.prod(map(size, ("prompts_per_step", "steps_per_generation", "num_generations")))
        epochs = max(1.0, to_bounded(grpo.get("num_iterations")) or size("epochs"))
        return RunFacts(
            max_completion_length=int(size("max_completion_length")),
            logprob_tolerance=tolerance,
            completions_per_call=completions / max(1.0, least_workers or 1.0),
            has_equal_difficulty=data.get("skip_solved") is None and not data.get("prefer_mixed"),
            rows_per_batch=math.ceil(size("steps_per_generation") * epochs / size("logging_steps")),
            heldout_noun=score_noun(_recorded_score(config)),
        )


def _recorded_score(config: Mapping[str, Any]) -> str:
    """Return the score of the first held-out set of a recorded config."""
    sets = _section(config, "data").get("heldout")
    first = next(iter(sets.values()), None) if isinstance(sets, Mapping) else sets
    if isinstance(first, str) and (benchmark := find_benchmark(first)):
        return benchmark[0].score
    functions = _section(config, "rewards").get("functions")
    names = [str(name) for name in functions] if isinstance(functions, list) and functions else ["correctness"]
    return str(_section(config, "heldout").get("score") or derived_score(names))


def recorded_thresholds(config: Mapping[str, Any]) -> HealthConfig:
    """Return the section `health` of a recorded config."""
    settings, section = HealthConfig(), _section(config, "health")
    for name in section.keys() & {field.name for field in dataclasses.fields(HealthConfig)}:
        try:
            changed = dataclasses.asdict(settings) | {name: section[name]}
            settings = type_adapter(HealthConfig).validate_python(changed)
        except ValidationError:
            continue
    return settings


def batch_sums(values: Sequence[float], rows: int) -> list[float]:
    """Return the sums of consecutive groups of `rows` values, the last of which ends with the latest value.

    Older values that do not fill a group are left out. If `rows` is the number of rows of a generation batch, each sum
    covers as many rows as one whole batch, although a batch need not begin with the first row of a group.
    """
    return [sum(values[end - rows : end]) for end in range(len(values), rows - 1, -rows)][::-1]


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    section = config.get(name)
    return section if isinstance(section, Mapping) else {}
