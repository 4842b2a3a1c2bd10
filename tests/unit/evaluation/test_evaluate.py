"""Tests of the environment variables of a process with an engine."""

from grpo_ray.config.loader import load_config
from grpo_ray.evaluation.evaluate import worker_environment


def test_worker_environment_limits_threads_only_when_known() -> None:
    assert "OMP_NUM_THREADS" not in worker_environment(load_config())
    assert worker_environment(load_config(None, ["cluster.threads_per_worker=3"]))["OMP_NUM_THREADS"] == "3"
    assert worker_environment(load_config(None, ["cluster.threads_per_worker=3"]), threads=2)["OMP_NUM_THREADS"] == "2"


def test_worker_environment_gpu_has_no_cpu_settings() -> None:
    cpu = worker_environment(load_config(None, ["engine.cpu_cache_gib=2"]))
    gpu = worker_environment(load_config(None, ["cluster.use_gpu=true"]))
    assert cpu["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert not [name for name in gpu if "CPU" in name] and "TORCH_COMPILE_DISABLE" not in gpu
