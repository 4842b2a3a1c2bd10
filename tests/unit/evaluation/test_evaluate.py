"""Tests of how an evaluation is divided over engines, and of the environment variables of a process with an engine."""

import pytest

from grpo_ray.config.loader import load_config
from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.evaluate import (
    divide,
    engine_count,
    engine_resources,
    parallel_arguments,
    worker_environment,
)

GPU = "cluster.use_gpu=true"
SHARED = "grpo.vllm_tensor_parallel_size=4"


def test_worker_environment_limits_threads_only_when_known() -> None:
    assert "OMP_NUM_THREADS" not in worker_environment(load_config())
    assert worker_environment(load_config(None, ["cluster.threads_per_worker=3"]))["OMP_NUM_THREADS"] == "3"
    assert worker_environment(load_config(None, ["cluster.threads_per_worker=3"]), threads=2)["OMP_NUM_THREADS"] == "2"


def test_worker_environment_gpu_has_no_cpu_settings() -> None:
    cpu = worker_environment(load_config(None, ["engine.cpu_cache_gib=2"]))
    gpu = worker_environment(load_config(None, ["cluster.use_gpu=true"]))
    assert cpu["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert not [name for name in gpu if "CPU" in name] and "TORCH_COMPILE_DISABLE" not in gpu


@pytest.mark.parametrize(
    ("overrides", "resources"),
    [
        ([], {"CPU": 1, "GPU": 0}),
        (["cluster.cpus_per_worker=3"], {"CPU": 3, "GPU": 0}),
        (["cluster.num_workers=4", SHARED], {"CPU": 1, "GPU": 0}),  # a shared engine is slower on the CPU
        ([GPU], {"CPU": 1, "GPU": 1}),
        ([GPU, "cluster.num_workers=4", SHARED], {"CPU": 4, "GPU": 4}),
        ([GPU, "cluster.num_workers=4", SHARED, "cluster.cpus_per_worker=12"], {"CPU": 12, "GPU": 4}),
    ],
)
def test_engine_resources_follow_the_engines_of_training(overrides: list[str], resources: dict[str, float]) -> None:
    assert engine_resources(load_config(None, overrides)) == resources


@pytest.mark.parametrize(
    ("overrides", "problems", "engines"),
    [
        ([GPU, "cluster.num_workers=8"], 1_999, 1),
        ([GPU, "cluster.num_workers=8"], 6_000, 3),  # 2,000 for each
        ([GPU, "cluster.num_workers=8"], 90_000, 8),
        ([GPU, "cluster.num_workers=8", SHARED], 90_000, 2),  # 8 GPUs hold two engines of 4
        ([GPU, "cluster.num_workers=4", SHARED], 90_000, 1),
    ],
)
def test_engine_count_by_problems_and_gpus(overrides: list[str], problems: int, engines: int) -> None:
    assert engine_count(load_config(None, overrides), problems) == engines


@pytest.mark.parametrize(("count", "sizes"), [(1, [7]), (2, [3, 4]), (3, [2, 2, 3])])
def test_divide_keeps_order_in_nearly_equal_parts(count: int, sizes: list[int]) -> None:
    problems = [Problem(id=f"{n:016x}", prompt=[], solution="1") for n in range(7)]
    parts = divide(problems, count)
    assert [len(part) for part in parts] == sizes
    assert [problem for part in parts for problem in part] == problems


def test_parallel_arguments_only_for_several_processes() -> None:
    assert parallel_arguments(1) == {}
    assert parallel_arguments(4) == {"tensor_parallel_size": 4, "distributed_executor_backend": "mp"}


def test_worker_environment_has_the_compile_cache_only_if_set() -> None:
    assert "VLLM_CACHE_ROOT" not in worker_environment(load_config())
    config = load_config(None, ["engine.compile_cache=/cache/vllm"])
    assert worker_environment(config)["VLLM_CACHE_ROOT"] == "/cache/vllm"


def test_worker_environment_leaves_the_model_runner_to_vllm_without_filters() -> None:
    assert "VLLM_USE_V2_MODEL_RUNNER" not in worker_environment(load_config(None, ["cluster.use_gpu=true"]))
    filtered = ["cluster.use_gpu=true", "grpo.top_p=0.9", "grpo.vllm_importance_sampling_mode=token_truncate"]
    assert worker_environment(load_config(None, filtered))["VLLM_USE_V2_MODEL_RUNNER"] == "0"
