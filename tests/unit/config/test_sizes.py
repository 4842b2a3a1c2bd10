"""Tests of the sizes that follow from a config."""

from typing import Any

import pytest
from config_cases import with_sizes

from grpo_ray.config.loader import load_config
from grpo_ray.config.schema import ClusterConfig, Config, DataConfig, GrpoConfig


def test_config_step_size_is_independent_of_workers() -> None:
    sizes = [with_sizes(num_workers=n, prompts_per_step=8, num_generations=4) for n in (1, 2, 4)]
    assert [c.sizes.completions_per_step for c in sizes] == [32, 32, 32]
    assert [c.sizes.prompts_per_worker for c in sizes] == [8, 4, 2]


def test_config_micro_batch_default_by_device_and_length() -> None:
    def of(**changed: Any) -> int:
        sizes = {"prompts_per_step": 12, "num_generations": 4, "max_completion_length": 256} | changed
        cluster = ClusterConfig(num_workers=sizes.pop("workers", 2), use_gpu=sizes.pop("use_gpu", False))
        return Config(cluster=cluster, grpo=GrpoConfig(**sizes)).sizes.micro_batch_size

    assert of() == 8  # 4 for each worker: 1,024 tokens at most
    assert [of(workers=n) for n in (1, 3, 4, 6)] == [4, 12, 16, 24]
    assert of(workers=(1, 4)) == 24  # 12 is the least that 1, 2, 3 and 4 workers can share
    assert of(max_completion_length=40) == 48  # a full pass takes 26 for each worker, more than half of the step
    assert of(max_completion_length=4096) == 2
    assert of(use_gpu=True) == of(trl={"loss_type": "bnpo"}) == 48
    assert of(micro_batch_size=6) == 6


def test_config_token_limit_gives_rows_that_fit_at_any_length() -> None:
    def of(tokens: int, workers: int | tuple[int, int] = 2, **data: Any) -> int:
        sizes: dict[str, Any] = {"prompts_per_step": 12, "num_generations": 4, "max_completion_length": 256}
        config = Config(
            cluster=ClusterConfig(num_workers=workers),
            data=DataConfig(**data),
            grpo=GrpoConfig(**sizes, tokens_per_micro_batch=tokens),
        )
        return config.sizes.micro_batch_size

    # 24 completions of each worker, of at most 256 + 44 tokens with their prompts
    assert of(1300, max_prompt_length=44) == 2 * 4
    assert of(1700, max_prompt_length=44) == 2 * 4  # 5 fit, and 4 divides 24
    assert of(10**6, max_prompt_length=44) == 2 * 24
    assert of(1700, workers=3, max_prompt_length=44) == 3 * 4  # of 16
    assert of(1700, workers=(1, 5), max_prompt_length=44) == 4 * 4  # 5 workers cannot share 12 problems
    assert of(1700) == 2 * 1  # the longest prompt is not known


@pytest.mark.parametrize(
    "prompts_of_its_own", ["rollout.environment=grpo_ray.tools.examples:Guess", "rollout.function=own_module:roll"]
)
def test_config_token_limit_with_prompts_of_any_length_gives_one_row(prompts_of_its_own: str) -> None:
    settings = [
        "cluster.num_workers=2", "grpo.prompts_per_step=8", "grpo.num_generations=4", "grpo.max_completion_length=256",
        "data.max_prompt_length=44", "grpo.tokens_per_micro_batch=1700",
    ]  # fmt: skip
    assert load_config(None, settings).sizes.micro_batch_size == 2 * 4
    sizes = load_config(None, [*settings, prompts_of_its_own]).sizes
    assert (sizes.longest_sequence, sizes.micro_batch_size) == (None, 2 * 1)
    bounded = load_config(None, [*settings, prompts_of_its_own, "engine.max_model_len=850"]).sizes
    assert (bounded.longest_sequence, bounded.micro_batch_size) == (850, 2 * 2)


def test_config_worker_counts_are_those_dividing_the_step() -> None:
    assert load_config(None, ["cluster.num_workers=[2, 4]"]).sizes.worker_counts == [2, 4]  # 3 does not divide 16
    assert load_config(None, ["cluster.num_workers=3", "grpo.prompts_per_step=6"]).sizes.worker_counts == [3]
    config = load_config(None, ["cluster.num_workers=[1, 8]", "grpo.micro_batch_size=4"])
    assert config.sizes.worker_counts == [1, 2, 4]  # 8 workers cannot share 4 completions
    assert config.with_workers(4).sizes.prompts_per_worker == 4 and config.to_dict()["cluster"]["num_workers"] == [1, 8]


def test_most_problems_count_steps_rounds_and_batches_ahead() -> None:
    settings = ["grpo.max_steps=6", "grpo.save_steps=6", "grpo.prompts_per_step=8"]
    assert load_config(None, settings).sizes.most_problems == 6 * 8 + 2 * 8
    assert load_config(None, [*settings, "grpo.dynamic_sampling=2"]).sizes.most_problems == 3 * (6 * 8 + 2 * 8)
    assert load_config(None, [*settings, "grpo.steps_per_generation=3"]).sizes.most_problems == 6 * 8 + 2 * 24


def test_step_of_fine_tuning_has_a_row_for_each_demonstration() -> None:
    config = load_config(None, ["run.kind=sft", "grpo.prompts_per_step=12", "grpo.max_completion_length=256"])
    # On CPUs a worker's pass has 1,024 tokens at full length: 2 x 1,024 / 256 = 8 rows, and 12 is the next divisor.
    assert (config.sizes.completions_per_step, config.sizes.micro_batch_size) == (12, 12)
    assert config.sizes.completions_per_generation == 96  # of an engine, which would sample groups of 8
