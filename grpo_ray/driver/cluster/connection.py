"""Connection to the Ray cluster, checks of its resources, and the number of threads of each worker."""

import logging
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Self

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from grpo_ray.config.schema import Config
from grpo_ray.device import compute_device, logical_gpus
from grpo_ray.driver.cluster.token_file import protect_token_file
from grpo_ray.driver.cluster.warm_start import end_warm_start, is_enabled, warm_executable
from grpo_ray.errors import ConfigError
from grpo_ray.evaluation.evaluate import engine_resources, worker_environment
from grpo_ray.observers.feed import RunObserver
from grpo_ray.resilience.nodes import engine_issue_of_own_node
from grpo_ray.resilience.ray_internals import (
    ended_cluster_process,
    has_autoscaler,
    longer_start,
    own_session,
    raylet_executable,
    recorded_cluster,
    without_monitors,
    without_prestarted_workers,
)
from grpo_ray.storage.uris import redact_credentials
from grpo_ray.telemetry.coordinator import RunCoordinator

QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
"""Arguments of `ray.init` that keep Ray's log off the progress bar."""

START_TIMEOUT = "timed out during startup"
"""Part of the message of the plain `Exception` that Ray raises if its processes do not start within its time limit."""

START_SECONDS = 180.0
"""Time limit of the start of a cluster on this machine."""

WATCH_SECONDS = 0.5
"""Time between two checks of the embedded cluster's processes."""

_HAS_STARTED = threading.Event()
"""Set while the cluster that this process uses is one that it has started."""

_UNSHOWN: list[str] = []
"""Notices of `start_cluster_while` that the next `connect` returns."""


@dataclass(frozen=True)
class ClusterChoice:
    """Cluster that `connect` uses."""

    address: str | None
    """Address of a running cluster, for messages; None: one is started on this machine."""
    notice: str | None = None
    """Line for the user, if the choice depends on more than RAY_ADDRESS."""


def choose_cluster() -> ClusterChoice:
    """Choose a cluster as a plain `ray.init` does: that of RAY_ADDRESS, or that of `ray start` on this machine.

    Without either, or if the latter is dead, a cluster is started; RAY_ADDRESS=local always starts one.
    """
    if address := os.environ.get("RAY_ADDRESS"):
        return ClusterChoice(None if address == "local" else f"RAY_ADDRESS={redact_credentials(address)}")
    if not (recorded := recorded_cluster()):
        return ClusterChoice(None)
    if recorded.is_alive():
        return ClusterChoice(
            recorded.address,
            f"using the Ray cluster at {recorded.address}, which `ray start` started on this machine; set "
            "RAY_ADDRESS=local to start one for this command alone",
        )
    return ClusterChoice(
        None,
        f"starting a Ray cluster: the one at {recorded.address}, which {recorded.file} names, does not run on this "
        "machine any more",
    )


def is_connected() -> bool:
    """Return True if this process has connected to a cluster."""
    return bool(ray.is_initialized())


def starts_cluster() -> bool:
    """Return True if `connect` is going to start a cluster on this machine."""
    return not is_connected() and choose_cluster().address is None


def owns_cluster() -> bool:
    """Return True if this process has started the cluster that it uses, or is going to start one."""
    return starts_cluster() or (_HAS_STARTED.is_set() and is_connected())


def connect(config: Config, runs: int = 1) -> list[str]:
    """Connect to the cluster that `choose_cluster` finds (for a Ray job, its own, by RAY_ADDRESS), or start one.

    Args:
        runs: number of such runs at a time for which a cluster that is started declares enough cores.

    Returns:
        Notices about the choice, if it depends on more than RAY_ADDRESS, and about a token file that others could read.

    Raises:
        ConfigError: the running cluster cannot be joined, or every user can read its token.
    """
    if is_connected():
        notices, _UNSHOWN[:] = _UNSHOWN[:], []
    else:
        notices = _connect(config, runs)
    from ray.data import DataContext  # takes a second, during which `start_cluster_while` already starts the cluster

    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it logs a line for each pipeline, over the progress bar
    DataContext.get_current().enable_progress_bars = False
    return notices


def _connect(config: Config, runs: int) -> list[str]:
    _configure_ray(config)
    _HAS_STARTED.clear()
    chosen = choose_cluster()
    of_token = protect_token_file(creates=chosen.address is None)
    if chosen.address is None:
        _start_cluster(config, runs)
    else:
        _join_cluster(chosen.address)
    return [notice for notice in (chosen.notice, of_token) if notice]


def _configure_ray(config: Config) -> None:
    # Ray Train's controller takes one report from each worker per poll and polls every 2 s by default. With a report
    # for each step, no step could be shorter than that. The controller inherits its environment from this process.
    os.environ.setdefault("RAY_TRAIN_HEALTH_CHECK_INTERVAL_S", "0.1")
    os.environ.setdefault("RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S", "2")  # some clouds announce it 30 s ahead
    if config.sizes.worker_counts != [config.cluster.max_workers]:
        # Elastic: a worker group that waits for a dead machine is then started with another number of workers.
        os.environ.setdefault("RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S", "30")


def start_cluster_while(config: Config, work: Callable[[], object]) -> None:
    """Call `work` in a thread, and meanwhile start the cluster of a command; without one to start, only call `work`.

    For the import of the command's libraries, which takes seconds on one core. Preflight's `connect` returns the
    notices of the start. `ray.init` stays in this thread: the kernel ends Ray's processes when the thread ends that has
    started them.

    Raises:
        ConfigError: as `connect`.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        done = pool.submit(work)
        if starts_cluster():
            _UNSHOWN[:] = _connect(config, runs=1)
        done.result()


def _join_cluster(address: str) -> None:
    try:
        # No address is passed: Ray finds it as `choose_cluster` does, and then also uses the token of that cluster.
        ray.init(**QUIET)
    except (ConnectionError, RuntimeError, ray.exceptions.AuthenticationError) as error:
        raise ConfigError(
            f"the Ray cluster at {address} cannot be joined: {' '.join(str(error).split())[:200]}\n"
            "if the cluster requires a token (`InvalidAuthToken` above), set RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN "
            "to the output of `ray get-auth-token` on one of its nodes; RAY_ADDRESS=local starts a cluster for this "
            "command alone"
        ) from None


def _start_cluster(config: Config, runs: int) -> None:
    cluster = config.cluster
    # Declare more cores than the workers take, even if the machine has fewer: Ray Data has to run beside the workers.
    least, most = config.engine.replica_range if config.engine.is_dedicated else (0, 0)
    further = cluster.max_workers + (most - least) * config.engine.tensor_parallel_size
    cpus = max(os.cpu_count() or 1, runs * (further * cluster.cpus_per_worker + cpus_beside_workers(config)))
    with ExitStack() as stack:
        if is_warm := is_enabled(compute_device(cluster.use_gpu) == "cuda"):
            environment = worker_environment(config, threads_on_this_machine(config))
            stack.enter_context(warm_executable(environment, raylet_executable()))
            stack.enter_context(without_prestarted_workers())
        stack.enter_context(own_session())
        stack.enter_context(longer_start(START_SECONDS))
        stack.enter_context(without_monitors())
        try:
            # Without "local", Ray would join a cluster that it has a record of. With num_gpus=None Ray counts GPUs.
            ray.init("local", num_cpus=cpus, num_gpus=logical_gpus(), include_dashboard=False, **QUIET)
            _HAS_STARTED.set()
            if is_warm:
                ray.remote(num_cpus=0)(_start_first_worker).remote()
        except Exception as error:  # Ray raises a plain one for its time limit; all others are raised again
            if START_TIMEOUT not in str(error):
                raise
            raise ConfigError(
                f"Ray did not start within {START_SECONDS:.0f} s; the machine is too busy: run the command again once "
                f"`uptime` shows a load below {2 * (os.cpu_count() or 1)}"
            ) from None


def _start_first_worker() -> None:
    """Do nothing, in the cluster's first worker: its start makes the warm servers import Ray at once.

    The worker is then used for the first actor of the run.
    """


class WarmStartEnd(RunObserver):
    """Observer that ends the warm start when all workers of a run have started, before they run model-written code.

    Workers that are started later, after a failure or because the run grows, import their libraries themselves.
    """

    def event(self, entry: Mapping[str, Any]) -> None:
        if entry["event"] == "began":
            end_warm_start()


class ClusterWatch:
    """Thread that reports the end of the cluster that this process has started: `with ClusterWatch(on_lost)`.

    Without it, Ray's calls would wait for 60 s, and then Ray's C++ library would end the process. A cluster that was
    joined is not watched.

    Args:
        on_lost: called once, in the thread, with the name of the process that has ended.
    """

    def __init__(self, on_lost: Callable[[str], None]):
        self.on_lost = on_lost
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watches the cluster", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()

    def _watch(self) -> None:
        while not self._stop.wait(WATCH_SECONDS):
            if name := ended_cluster_process():
                self.on_lost(name)
                return


@dataclass(frozen=True)
class Shortage:
    """Resources that a cluster lacks."""

    text: str
    """Requirement with its amount, and the amount that the cluster has."""
    remedy: str
    """Settings with which the present cluster is enough."""


def require_resources(config: Config) -> str | None:
    """Check that the cluster can train with the smallest allowed worker count, and measure checkpoints.

    Returns:
        A notice if resources are missing but the cluster's autoscaler may add them; None if nothing is missing.

    Raises:
        ConfigError: resources are missing, and the cluster has no autoscaler.
    """
    nodes = _nodes()
    return _notice_or_error(training_shortage(config, nodes) or evaluation_shortage(config, nodes))


def require_evaluation_resources(config: Config) -> str | None:
    """Check that the cluster can run an engine that evaluates; result and errors as in `require_resources`."""
    return _notice_or_error(evaluation_shortage(config, _nodes()))


def require_engine_system(config: Config) -> None:
    """Check that the system of the driver's own node can run vLLM: NVIDIA driver or libnuma. Raises ConfigError."""
    if issue := engine_issue_of_own_node(config):
        raise ConfigError(issue)


def _nodes() -> list[Mapping[str, float]]:
    """Return the resources of each living node."""
    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def _notice_or_error(shortage: Shortage | None) -> str | None:
    if shortage is None:
        return None
    if has_autoscaler():
        return f"{shortage.text}; waiting for its autoscaler to start more nodes"
    raise ConfigError(f"{shortage.text}; {shortage.remedy}")


def cpus_beside_workers(config: Config) -> int:
    """Return the CPU cores that a run needs beside its workers.

    They are those of the fewest dedicated engines, and one for Ray Data or those of a background engine, which use them
    in turn.
    """
    return (
        int(max(1, background_resources(config)["CPU"])) + dedicated_processes(config) * config.cluster.cpus_per_worker
    )


def dedicated_processes(config: Config) -> int:
    """Return the number of processes of the fewest dedicated engines, each with its own GPU if the run uses any."""
    engine = config.engine
    return engine.replica_range[0] * engine.tensor_parallel_size if engine.is_dedicated else 0


def background_resources(config: Config) -> dict[str, float]:
    """Return the CPUs and GPUs of the engine that measures checkpoints beside training; 0 if the workers do it."""
    return engine_resources(config) if config.run.measure == "background" else {"CPU": 0, "GPU": 0}


def gpus_beside_workers(config: Config) -> float:
    """Return the GPUs that a run needs beside those of its workers.

    They are those of the fewest dedicated engines, of a background engine, and of reward models.
    """
    models = config.reward_model_gpus if config.reward_model_gpus == 1 else 0
    engines = dedicated_processes(config) if config.cluster.use_gpu else 0
    return engines + background_resources(config)["GPU"] + models


def run_resources(config: Config) -> dict[str, float]:
    """Return the CPUs and GPUs that a run takes at most, with everything beside its workers."""
    cluster = config.cluster
    gpus = cluster.max_workers + gpus_beside_workers(config) if cluster.use_gpu else 0.0
    return {"CPU": cluster.max_workers * cluster.cpus_per_worker + cpus_beside_workers(config), "GPU": gpus}


def spare_workers(config: Config) -> int:
    """Return the number of workers whose resources an elastic run leaves free for everything beside its workers.

    Without GPUs they are those of the dedicated engines, whose processes reserve as many CPUs as a worker; a background
    engine and Ray Data then wait for CPUs.
    """
    return math.ceil(gpus_beside_workers(config)) if config.cluster.use_gpu else dedicated_processes(config)


def training_shortage(config: Config, nodes: Sequence[Mapping[str, float]]) -> Shortage | None:
    """Return the resources that the nodes lack to train with the smallest allowed worker count; None if there are none.

    Args:
        nodes: resources of each node.
    """
    cluster, engine, workers = config.cluster, config.engine, min(config.sizes.worker_counts)
    total = {name: sum(node.get(name, 0) for node in nodes) for name in ("CPU", "GPU")}
    engine_gpus = background_resources(config)["GPU"]
    of_training = workers + (dedicated_processes(config) if cluster.use_gpu else 0)
    if cluster.use_gpu and total["GPU"] < workers:
        return Shortage(
            f"cluster.num_workers={workers} with cluster.use_gpu=true needs {workers} GPUs, and the cluster has "
            f"{total['GPU']:.0f}",
            "use fewer workers, or cluster.use_gpu=false",
        )
    if shortage := dedicated_shortage(config, nodes, workers):
        return shortage
    if cluster.use_gpu and total["GPU"] < of_training + engine_gpus:
        engines = f" and of {_engines_text(config)}" if engine.is_dedicated else ""
        return Shortage(
            f"run.measure=background needs {engine_gpus:.0f} GPU{'s' * (engine_gpus > 1)} for an engine beside those "
            f"of cluster.num_workers={workers}{engines}, and the cluster has {total['GPU']:.0f}",
            "use fewer workers, or run.measure=inline",
        )
    if cluster.use_gpu and total["GPU"] < workers + gpus_beside_workers(config):
        return Shortage(
            f"rewards.model_gpus={config.rewards.model_gpus:g} needs a GPU for the reward models beside the "
            f"{of_training + engine_gpus:.0f} of {'workers and engines' if engine.is_dedicated else 'the engines'}, "
            f"and the cluster has {total['GPU']:.0f}",
            "set rewards.model_gpus=0.25, which shares the GPU of a worker, or use fewer workers",
        )
    return _cpu_shortage(config, total["CPU"], workers)


def _cpu_shortage(config: Config, available: float, workers: int) -> Shortage | None:
    """Return the CPUs that the cluster lacks for the workers and everything beside them; None if there are enough."""
    cluster, engine, beside = config.cluster, config.engine, cpus_beside_workers(config)
    cpus = workers * cluster.cpus_per_worker + beside
    if available >= cpus:
        return None
    most = int(available - beside) // cluster.cpus_per_worker
    fitting = [count for count in range(1, most + 1) if _is_accepted(config, count)]
    remedies = [f"set cluster.num_workers={fitting[-1]}"] if fitting else []
    of_engines = dedicated_processes(config) * cluster.cpus_per_worker
    parts = [f"cluster.num_workers={workers} x cluster.cpus_per_worker={cluster.cpus_per_worker}"]
    if of_engines:
        parts.append(f"{of_engines} for {_engines_text(config)}")
        replicas = int(available - cpus + of_engines) // (cluster.cpus_per_worker * engine.tensor_parallel_size)
        remedies += [f"set engine.replicas={replicas}"] if replicas > 0 else []
    others = "an engine (run.measure=background)" if config.run.measure == "background" else "Ray Data"
    parts.append(f"{beside - of_engines} for {others}")
    return Shortage(
        f"{' and '.join(parts)} need {cpus} CPUs, and the cluster has {available:.0f}",
        " or ".join([*remedies, f"start a node that counts more CPUs than it has (`ray start --num-cpus={cpus}`)"]),
    )


def dedicated_shortage(config: Config, nodes: Sequence[Mapping[str, float]], workers: int) -> Shortage | None:
    """Return the resources that the nodes lack for the fewest dedicated engines beside the workers' GPUs.

    All processes of an engine are on one node. None if nothing is missing, or the engines are colocated.

    Args:
        nodes: resources of each node.
        workers: number of workers, each with a GPU if the run uses any.
    """
    engine, cluster = config.engine, config.cluster
    if not engine.is_dedicated:
        return None
    needed = {"CPU": float(engine.tensor_parallel_size * cluster.cpus_per_worker)}
    if cluster.use_gpu:
        needed["GPU"] = float(engine.tensor_parallel_size)
    for resource, amount in reversed(needed.items()):
        if (largest := max((node.get(resource, 0) for node in nodes), default=0)) < amount:
            return _too_large_engine(config, resource, amount, largest)
    total = {resource: sum(node.get(resource, 0) for node in nodes) for resource in needed}
    processes, least = dedicated_processes(config), engine.replica_range[0]
    on_nodes = sum(int(min(node.get(name, 0) // amount for name, amount in needed.items())) for node in nodes)
    beside = {
        "CPU": workers * cluster.cpus_per_worker + cpus_beside_workers(config) - processes * cluster.cpus_per_worker,
        "GPU": workers + gpus_beside_workers(config) - processes,
    }
    fitting = int(min(on_nodes, *((total[name] - beside[name]) // amount for name, amount in needed.items())))
    remedies = [f"set engine.replicas={fitting}"] if fitting > 0 else []
    if on_nodes < least:
        amounts = " and ".join(_amount(amount, name) for name, amount in reversed(needed.items()))
        text = (
            f"{_engines_text(config)} do not fit on the nodes of the cluster, since an engine needs {amounts} of one "
            f"node: there is space for {on_nodes}"
        )
    elif "GPU" in needed and total["GPU"] < workers + processes:
        most = int(total["GPU"] - processes)
        fewer = [count for count in range(1, min(most, workers - 1) + 1) if _is_accepted(config, count)]
        remedies += [f"set cluster.num_workers={fewer[-1]}"] if fewer else []
        text = (
            f"{_engines_text(config)} need {_amount(processes, 'GPU')} beside the {workers} of "
            f"cluster.num_workers={workers}, and the cluster has {total['GPU']:.0f}"
        )
    else:
        return None
    return Shortage(text, " or ".join([*remedies, "set engine.placement=colocated"]))


def _too_large_engine(config: Config, resource: str, amount: float, largest: float) -> Shortage:
    """Return the shortage of an engine that is larger than each node."""
    size, cpus = config.engine.tensor_parallel_size, config.cluster.cpus_per_worker
    setting = f"engine.tensor_parallel_size={size}"
    per_process = 1
    if resource == "CPU":
        setting, per_process = f"{setting} x cluster.cpus_per_worker={cpus}", cpus
    remedies = ["use larger nodes"]
    if (most := int(largest // per_process)) >= 1:
        remedies.append(f"set engine.tensor_parallel_size={1 << (most.bit_length() - 1)}")  # mostly divides the heads
    if resource == "CPU" and largest >= size:
        remedies.append(f"set cluster.cpus_per_worker={int(largest // size)}")
    if not largest:
        remedies = ["set cluster.use_gpu=false"]
    return Shortage(
        f"a dedicated engine with {setting} needs {_amount(amount, resource)} of one node, and the largest node has "
        f"{largest:.0f}",
        " or ".join(remedies),
    )


def _engines_text(config: Config) -> str:
    """Name the settings that give the number of processes of the fewest dedicated engines."""
    engine = config.engine
    least = engine.replica_range[0]
    replicas = f"{least}" if isinstance(engine.replicas, int) else f"{list(engine.replicas)} (at least {least})"
    return f"engine.replicas={replicas} x engine.tensor_parallel_size={engine.tensor_parallel_size}"


def _amount(number: float, resource: str) -> str:
    return f"{number:.0f} {resource}{'s' * (number != 1)}"


def _is_accepted(config: Config, workers: int) -> bool:
    """Return True if the same config with another number of workers passes the checks of a config."""
    try:
        replace(config, cluster=replace(config.cluster, num_workers=workers))
    except ValueError:
        return False
    return True


def evaluation_shortage(config: Config, nodes: Sequence[Mapping[str, float]]) -> Shortage | None:
    """Return the resources that every node lacks to run an engine that evaluates a policy; None if a node has them.

    Args:
        nodes: resources of each node.
    """
    needed = engine_resources(config)
    gpus, cpus = math.ceil(needed["GPU"]), int(needed["CPU"])
    large_enough = [node for node in nodes if node.get("GPU", 0) >= gpus]
    if not large_enough:
        largest = max((node.get("GPU", 0) for node in nodes), default=0)
        setting, remedy = "cluster.use_gpu=true", "set cluster.use_gpu=false"
        if gpus > 1:
            setting = f"{config.tensor_parallel_field}={gpus}"
            remedy = f"use larger nodes, or a smaller {config.tensor_parallel_field}"
        return Shortage(
            f"measuring held-out problems with {setting} needs {gpus} GPU{'s' * (gpus > 1)} of one node, and the "
            f"largest node has {largest:.0f}",
            remedy,
        )
    of_models = 1 if config.measures_with_reward_models and config.reward_model_gpus == 1 else 0
    total = sum(node.get("GPU", 0) for node in nodes)
    if total < gpus + of_models:
        return Shortage(
            f"measuring held-out problems with reward models and rewards.model_gpus=1 needs {gpus + of_models} GPUs, "
            f"and the cluster has {total:.0f}",
            "set rewards.model_gpus=0.25, which shares the engine's GPU, or 0, which uses the CPU",
        )
    most_cpus = max(node.get("CPU", 0) for node in large_enough)
    if most_cpus < cpus:
        return Shortage(
            f"measuring held-out problems with cluster.cpus_per_worker={config.cluster.cpus_per_worker} needs {cpus} "
            f"CPUs of one node{' with GPUs' * bool(gpus)}, and the largest has {most_cpus:.0f}",
            "set a smaller cluster.cpus_per_worker",
        )
    return None


def start_coordinator() -> Any:
    """Start the run's `RunCoordinator` actor; returns its handle."""
    # On the driver's node: losing any other machine must not lose the coordinator.
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    return ray.remote(num_cpus=0, scheduling_strategy=here)(RunCoordinator).remote()


def threads_per_worker(config: Config) -> int:
    """Compute the threads of one worker: the configured number, or an equal share of a node's cores."""
    if config.cluster.threads_per_worker:
        return config.cluster.threads_per_worker
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    resource = "GPU" if config.cluster.use_gpu else "CPU"
    nodes = [node for node in nodes if node.get(resource)]
    if len(nodes) <= 1:  # `_start_cluster` may declare more cores than the machine has
        return threads_on_this_machine(config)
    workers_on_node = -(-config.cluster.max_workers // len(nodes))
    return max(1, int(min(node.get("CPU", 1) for node in nodes)) // workers_on_node)


def threads_on_this_machine(config: Config) -> int:
    """Compute the threads of one worker where all workers share this machine."""
    return config.cluster.threads_per_worker or max(1, (os.cpu_count() or 1) // config.cluster.max_workers)
