"""The dedicated engines of a run, on the driver's side: their pool, and the resources that they reserve."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_ray.config.schema import Config
from grpo_ray.driver.cluster.connection import threads_per_worker
from grpo_ray.errors import GrpoRayError
from grpo_ray.evaluation.evaluate import worker_environment
from grpo_ray.inference.pool.engine_process import EngineSpec
from grpo_ray.inference.pool.pool import EnginePool
from grpo_ray.resilience.nodes import versions

STOP_SECONDS = 30.0
"""Longest time that the end of a run waits for its engines to end. The end of the driver ends them too."""
MANY_CALLS = 1_000
"""Calls of the pool that may wait at the same time; each worker has two at most."""


def start_pool(config: Config, model_path: str, coordinator: Any, kind: type[EnginePool] = EnginePool) -> Any | None:
    """Start the pool of the run's dedicated engines; return its handle, or None with colocated engines.

    The engines themselves are started by `running_engines`.

    Args:
        model_path: folder, URI or hub id of the initial policy.
        coordinator: handle of the run's `RunCoordinator` actor.
        kind: class of the pool.
    """
    if not config.engine.is_dedicated:
        return None
    spec = EngineSpec(
        config=config,
        model_path=model_path,
        max_num_seqs=completions_at_once(config),
        versions=versions(),
        environment=worker_environment(config, threads_per_worker(config)),
        coordinator=coordinator,
    )
    # On the driver's node, as the coordinator: losing any other machine must not lose the pool.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    actor = ray.remote(num_cpus=0, max_concurrency=MANY_CALLS, scheduling_strategy=here)(kind)
    return actor.remote(spec)


def completions_at_once(config: Config) -> int:
    """Return the largest number of completions that an engine generates at the same time.

    They are its part of a generation batch; with partial completions, which an engine continues beside those of the
    next batch, twice as many.
    """
    return config.sizes.completions_per_engine * (2 if config.rollout.max_staleness > 1 else 1)


@contextmanager
def running_engines(pool: Any | None) -> Iterator[None]:
    """Reserve the engines' resources and start them; end them after the block. Does nothing without a pool."""
    if pool is None:
        yield
        return
    try:
        ray.get(pool.reserve.remote())
        yield
    except ray.exceptions.RayTaskError as error:
        if isinstance(error.cause, GrpoRayError):
            raise error.cause from None
        raise
    finally:
        with suppress(ray.exceptions.RayError):  # the cluster may be lost
            ray.get(pool.stop.remote(), timeout=STOP_SECONDS)
