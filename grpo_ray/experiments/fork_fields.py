"""Config fields that a fork, or the replay of a step, may change.

| table | decision |
|---|---|
| `resume_fields.FIXED` | a fork continues a run: what a resumed run refuses, a fork refuses |
| `REFUSED` | a fork refuses these too, with the reason |
| `resume_fields.APPLIED` | all others take effect from the fork's first step |
| `LAUNCH` | the only fields that a replay may change: where and how the step is computed, not what it is |
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

LAUNCH = frozenset(resume_fields.APPLIED[resume_fields.LAUNCH]) - REFUSED.keys()
"""Fields that do not change what a step computes, except by rounding."""


def require_changeable(overrides: Sequence[str], *, is_replay: bool = False) -> None:
    """Refuse overrides of fields that a fork, or a replay, cannot change.

    Raises:
        ConfigError: with the field and the reason.
    """
    for override in overrides:
        field = ".".join(override.partition("=")[0].split(".")[:2])
        if field in REFUSED:
            raise ConfigError(f"{override}: {field} cannot be set here: {REFUSED[field]}; leave it out")
        if is_replay and field not in LAUNCH:
            raise ConfigError(
                f"{override}: a replay takes the step with the run's own settings; leave it out, or use grpo-ray fork "
                "to change a setting"
            )
