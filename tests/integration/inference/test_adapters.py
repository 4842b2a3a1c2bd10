"""Adapters of every type in a real engine: proven syncs, equal log-probabilities, an untouched learner."""

from pathlib import Path

import pytest
from adapters import SMALL, VARIANTS

from grpo_ray.config.peft_fields import NOT_QUANTIZED

QUICK = ("LORA", "OFT", "LN_TUNING", "norms")
"""Tried in each run of the tests, in 16 bits."""

ALL = (*SMALL, *VARIANTS)
IN_FOUR_BITS = tuple(name for name in ALL if name not in (*NOT_QUANTIZED, "PiSSA", "OLoRA"))
"""Types and variants that `model.quantization` goes with."""

TOLERANCE = {"float32": 1e-5, "bfloat16": 0.05}
"""Largest mean difference of the log-probabilities of engine and learner, nats; in 16 bits that of a run."""


@pytest.mark.parametrize(
    ("dtype", "method", "names"),
    [
        ("bfloat16", None, QUICK),
        ("bfloat16", "nf4", ("LORA", "norms")),
        pytest.param("bfloat16", None, ALL, marks=pytest.mark.slow, id="bfloat16-all"),
        pytest.param("float32", None, ALL, marks=pytest.mark.slow, id="float32-all"),
        pytest.param("bfloat16", "nf4", IN_FOUR_BITS, marks=pytest.mark.slow, id="bfloat16-nf4-all"),
        pytest.param("float32", "nf4", IN_FOUR_BITS, marks=pytest.mark.slow, id="float32-nf4-all"),
    ],
)
def test_engine_has_the_merged_adapter(
    cluster: None, policy: Path, dtype: str, method: str | None, names: tuple[str, ...]
) -> None:
    import ray
    from adapter_probe import STEPS, observe_adapters

    from grpo_ray.config.loader import load_config
    from grpo_ray.evaluation.evaluate import worker_environment

    environment = worker_environment(load_config(), threads=1)
    task = ray.remote(max_calls=1)(observe_adapters).options(runtime_env={"env_vars": environment})
    found = ray.get(task.remote(str(policy), dtype, names, method))
    assert found.keys() == set(names)
    for name, seen in found.items():
        print(name, [f"{gap:.1e}" for gap in seen.gaps], f"{seen.moved:.1e}")
        assert len(seen.gaps) == STEPS + 1 and max(seen.gaps) < TOLERANCE[dtype], name
        assert seen.moved > 0 and seen.is_kept, name
        assert "does not hold the learner's weights" in seen.stale, name
        assert "does not hold the learner's weights" in seen.of_other_base, name
