"""Rule of thumb for a run's report: would dedicated engines be worth a look?

It needs nothing but metrics. `grpo-ray check` simulates instead (`driver/placement_model`).
"""

from dataclasses import dataclass

from grpo_ray.config.checks import MIN_SEGMENT

GENERATING_SHARE = 0.5
"""Share of a step's time spent on generating from which dedicated engines may gain enough."""
TAIL = 3.0
"""Longest completion, as a multiple of the mean, from which short segments gain most: most engines wait for few
completions."""


@dataclass(frozen=True, kw_only=True)
class GenerationFacts:
    """Latest steps of a run with colocated engines."""

    generating_share: float
    """Share of the steps' time in which engines generate or wait for the slowest one, 0 to 1."""
    mean_length: float
    """Mean length of completions, tokens."""
    longest: float
    """Longest completion of a step, tokens."""
    max_completion_length: int
    """Longest completion allowed, tokens."""
    gpus: int
    """GPUs of the workers; 0 without GPUs."""


def recommended_staleness(facts: GenerationFacts) -> int | None:
    """Return the value of `rollout.max_staleness` to try with dedicated engines; None if colocated ones suit the run.

    Dedicated engines suit neither a single GPU nor a step that mostly learns. One version is enough if all completions
    take about as long; more let a long completion take several steps, unless its segments would be too short.
    """
    if facts.gpus < 2 or not facts.generating_share > GENERATING_SHARE:
        return None
    wanted = 4 if facts.longest > TAIL * facts.mean_length else 2
    return next((k for k in (wanted, wanted // 2) if facts.max_completion_length / k >= MIN_SEGMENT), 1)


def placement_advice(facts: GenerationFacts) -> str | None:
    """Return the advice of a run's report in one line; None if there is none."""
    staleness = recommended_staleness(facts)
    if staleness is None:
        return None
    share, tail = f"{facts.generating_share:.0%}".replace("%", " %"), facts.longest / max(1.0, facts.mean_length)
    return (
        f"generation takes {share} of the time, and the longest completions have {tail:.1f} times the mean length: "
        f"consider dedicated engines (engine.placement=dedicated, rollout.max_staleness={staleness}); grpo-ray check "
        "estimates the gain"
    )
