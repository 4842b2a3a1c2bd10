"""Options that do not go with generation one step ahead."""

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.errors import ConfigError


@pytest.mark.parametrize(
    ("other", "fix"),
    [
        ("grpo.dynamic_sampling=2", "grpo.dynamic_sampling=0"),
        ("grpo.num_iterations=2", "grpo.num_iterations=1"),
        ("grpo.vllm_tensor_parallel_size=2", "grpo.vllm_tensor_parallel_size=1"),
        ("grpo.vllm_enable_sleep_mode=true", "grpo.vllm_enable_sleep_mode=false"),
        ("cluster.shard_learner=true", "cluster.shard_learner=false"),
    ],
)
def test_load_generate_ahead_with_other_option_raises(other: str, fix: str) -> None:
    settings = ["grpo.save_steps=2", "cluster.use_gpu=true", other]
    load_config(None, settings)
    with pytest.raises(ConfigError, match=rf"grpo\.generate_ahead=true does not go with .* set {fix}, or"):
        load_config(None, [*settings, "grpo.generate_ahead=true"])
