"""Config fields that a fork, or the replay of a step, may change.

| table | decision |
|---|---|
| `resume_fields.FIXED` | a fork continues a run: what a resumed run refuses, a fork refuses |
| `REFUSED` | a fork refuses these too, with the reason |
| `resume_fields.APPLIED` | all others take effect from the fork's first step |
| `CONTINUED` | these may change when an interrupted or paused fork goes on; by all others, forks are told apart |
| `LAUNCH` | the only fields that a replay may change: where and how the step is computed, not what it is |
| `OF_REPLAY` | a replay sets these itself |
"""

from collections.abc import Sequence

from grpo_ray.driver.preflight import resume_fields
from grpo_ray.errors import ConfigError

REFUSED = {
    "run.resume": "a fork begins with the checkpoint of --at, and continues from its own latest one",
    "run.from_checkpoint": "a fork begins with the checkpoint of --at",
    "data.accept_changes": "both runs take the same problems, so that their rewards can be compared",
}
"""Field -> reason why a fork cannot set it."""

CONTINUED = frozenset(
    {field for field in resume_fields.APPLIED[resume_fields.LAUNCH] if field.startswith("run.")}
    | {*resume_fields.APPLIED[resume_fields.WARNINGS]}
)
"""Fields of a launch of a fork, without those by which its numbers may be rounded differently."""

OF_REPLAY = frozenset({"run.pause_at", "run.trackers", "run.notify", "run.trace", "run.max_failures"})
"""Fields of the launch that a replay sets itself (`replay.replay_config`)."""

LAUNCH = frozenset(resume_fields.APPLIED[resume_fields.LAUNCH]) - REFUSED.keys() - OF_REPLAY
"""Fields that do not change what a step computes, except by rounding."""


def require_changeable(overrides: Sequence[str], *, is_replay: bool = False) -> None:
    """Refuse overrides of fields that a fork, or a replay, cannot change.

    Raises:
        ConfigError: with the field and the reason.
    """
    for override in overrides:
        field = field_of(override)
        if field in REFUSED:
            raise ConfigError(f"{override}: {field} cannot be set here: {REFUSED[field]}; leave it out")
        if is_replay and field in OF_REPLAY:
            raise ConfigError(f"{override}: a replay sets {field} itself; leave it out")
        if is_replay and field not in LAUNCH:
            raise ConfigError(
                f"{override}: a replay takes the step with the run's own settings; leave it out. Settings that the "
                "run folder lacks, such as secrets, are given with --config; grpo-ray fork changes a setting"
            )


def identifying(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that tell a fork from another one."""
    return [override for override in overrides if field_of(override) not in CONTINUED]


def field_of(override: str) -> str:
    """Return the field of an override, without the entry of a mapping that it may name."""
    return ".".join(override.partition("=")[0].split(".")[:2])
