"""Calls in the environment of a train worker, for probes that start engines."""

from collections.abc import Callable
from typing import Any


def call_in_worker(function: Callable[..., Any], *arguments: Any, **variables: str) -> Any:
    """Call a function in a Ray task of the tests' cluster whose process ends with it; return its result.

    Without further environment variables, the process is forked from the warm server of the tests' cluster, which has
    imported the libraries for workers of one thread; with other variables, or threads, it would import them itself.
    """
    import ray

    from grpo_ray.config.loader import load_config
    from grpo_ray.evaluation.evaluate import worker_environment

    environment = worker_environment(load_config(), threads=1) | variables
    task = ray.remote(max_calls=1)(function).options(runtime_env={"env_vars": environment})
    return ray.get(task.remote(*arguments))
