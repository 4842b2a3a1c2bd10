from grpo_ray.evaluate import worker_environment
from grpo_ray.settings import load


def test_threads_are_limited_only_where_a_number_is_known():
    assert "OMP_NUM_THREADS" not in worker_environment(load())
    assert worker_environment(load(None, ["cluster.threads_per_worker=3"]))["OMP_NUM_THREADS"] == "3"
    assert worker_environment(load(None, ["cluster.threads_per_worker=3"]), threads=2)["OMP_NUM_THREADS"] == "2"


def test_the_cpus_own_settings_are_not_made_on_a_gpu():
    cpu = worker_environment(load(None, ["engine.cpu_cache_gib=2"]))
    gpu = worker_environment(load(None, ["cluster.use_gpu=true"]))
    assert cpu["VLLM_CPU_KVCACHE_SPACE"] == "2"
    assert not [name for name in gpu if "CPU" in name] and "TORCH_COMPILE_DISABLE" not in gpu
