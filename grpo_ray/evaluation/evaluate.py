"""Evaluation of a policy on held-out problems with vLLM engines in Ray tasks: pass@1, pass@k and maj@k."""

import math
import os
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import ray

from grpo_ray.config.schema import Config
from grpo_ray.data.problem import Problem
from grpo_ray.data.stream import Split
from grpo_ray.device import compute_device, device_environment, gpu_bytes
from grpo_ray.errors import GrpoRayError
from grpo_ray.evaluation.metrics import EvaluationResult, heldout_metrics, summarize_sets, unique_problems
from grpo_ray.evaluation.records import problems_with_texts, write_records
from grpo_ray.models.memory import reward_model_memory
from grpo_ray.resilience.error_triage import describe_worker_error
from grpo_ray.rewards.reward_models import running_reward_models
from grpo_ray.storage.checkpoints import MEASURED, checkpoint_score
from grpo_ray.storage.run_folder import RunFolder

MIN_PROBLEMS_PER_ENGINE = 2_000
"""Fewest problems per engine: with fewer, starting another engine takes longer than it saves."""


def evaluate(
    config: Config,
    model_path: str,
    splits: Mapping[str, Split],
    *,
    limits_template: bool = False,
    on_progress: Callable[[str], None] = lambda activity: None,
) -> dict[str, EvaluationResult]:
    """Evaluate a policy on held-out sets, with engines in Ray tasks that reserve `engine_resources` each.

    Ray must be connected. The call blocks until the resources are free.

    Args:
        model_path: local folder, URI or hub id of a policy or an adapter.
        splits: key of a held-out set -> its problems.
        limits_template: render the policy's chat template in a process with limits, since it may be untrusted.
        on_progress: called with the current activity, for the progress line.

    Returns:
        Key of a held-out set -> its evaluation.

    Raises:
        GrpoRayError: an engine cannot load or measure this policy.
    """
    resources = engine_resources(config)
    on_progress(_activity(math.ceil(resources["GPU"])))
    sets = {key: list(split.read()) for key, split in splits.items()}
    problems = unique_problems(sets)
    # Ray would set the same number of threads, but too late for a process forked from a warm server, which has already
    # imported the libraries.
    threads = config.cluster.threads_per_worker or max(1, int(resources["CPU"]) // engine_processes(config))
    solve = ray.remote(
        num_cpus=resources["CPU"],
        num_gpus=resources["GPU"],
        max_calls=1,  # the process ends with its engine
        runtime_env={"env_vars": worker_environment(config, threads)},
    )(solve_shard)
    recorded = problems_with_texts(sets)
    shards = divide(problems, engine_count(config, len(problems)))
    with running_reward_models(config) if config.measures_with_reward_models else nullcontext():
        tasks = [solve.remote(shard, config, model_path, recorded, limits_template) for shard in shards]
        rows = [row for rows_of_shard in _results(tasks) for row in rows_of_shard]
    return summarize_sets(rows, sets, config.heldout.num_samples)


def _activity(gpus: int) -> str:
    """Describe the start of an evaluation, or its wait for GPUs that other work holds."""
    if gpus and ray.available_resources().get("GPU", 0) < gpus:
        return f"waiting for {'a free GPU' if gpus == 1 else f'{gpus} free GPUs'} to measure with"
    return "starting an engine to measure with"


def engine_resources(config: Config) -> dict[str, float]:
    """Return the amounts of Ray's resources "CPU" and "GPU" that an evaluation's engine reserves, on a single node."""
    processes = engine_processes(config)
    gpus: float = processes if config.cluster.use_gpu else 0
    if gpus:
        gpus -= config.reward_model_share_of_engines
    return {"CPU": max(config.cluster.cpus_per_worker, processes), "GPU": gpus}


def engine_processes(config: Config) -> int:
    """Return the number of processes of an evaluation's engine, each with a GPU of its own; 1 without GPUs.

    The number is the same as in training: a policy whose engines span several GPUs may not fit on one.
    """
    return config.tensor_parallel_size if config.cluster.use_gpu else 1


def engine_count(config: Config, problems: int) -> int:
    """Return the number of engines among which an evaluation divides its problems."""
    return max(1, min(config.cluster.max_workers // engine_processes(config), problems // MIN_PROBLEMS_PER_ENGINE))


def divide(problems: Sequence[Problem], count: int) -> list[list[Problem]]:
    """Divide problems into consecutive parts of nearly equal size."""
    bounds = [len(problems) * part // count for part in range(count + 1)]
    return [list(problems[start:end]) for start, end in pairwise(bounds)]


def _results(tasks: list[Any]) -> list[list[dict[str, Any]]]:
    """Wait for the tasks and return their results in order; if one fails, cancel the others.

    Raises:
        GrpoRayError: error of the first failed task, without Ray's wrapper and its traceback.
    """
    try:
        return ray.get(tasks)
    except BaseException as error:  # also on an interrupt: the engines could run for hours
        for task in tasks:
            ray.cancel(task, force=True)
        cause = getattr(error, "cause", None)
        if isinstance(cause, GrpoRayError):
            raise cause from None
        raise


@dataclass(frozen=True)
class CheckpointEvaluator:
    """Evaluation of a checkpoint during training: the `fn` of Ray Train's `ValidationConfig`."""

    config: Config
    folder: RunFolder
    splits: Mapping[str, Split]
    """Key of a held-out set -> its problems."""
    measured_on: Mapping[str, Any]
    """Key of a held-out set -> conditions of its measurement (`metrics.measurement_conditions`)."""
    coordinator: Any
    """Handle of the `RunCoordinator` actor. Its event `measured` updates the step's row in `metrics.jsonl`."""

    def __call__(self, checkpoint: Any, step: int) -> dict[str, float]:
        """Evaluate a checkpoint; return the metrics that Ray Train adds to those reported with it.

        Args:
            checkpoint: a `ray.train.Checkpoint`.
            step: the checkpoint's step.
        """
        name = checkpoint.path.rstrip("/").rpartition("/")[2]
        try:
            results = evaluate(self.config, self.folder.address_of(name), self.splits)
        except Exception as error:  # of any library; Ray Train only logs it, and the run would end without a message
            self.coordinator.record_event.remote(
                "notice", what=f"{name} could not be measured: {describe_worker_error(error)}"
            )
            raise
        metrics = heldout_metrics(results, self.config.primary_heldout)
        write_records(self.folder, step, results, policy=name, conditions=self.measured_on)
        # In a separate file, since the manifest is already written and Ray's record may be lost.
        self.folder.write_json({"metrics": metrics, "measured_on": self.measured_on}, name, MEASURED)
        ray.get(self.coordinator.record_event.remote("measured", step=step, metrics=metrics))
        return metrics | checkpoint_score(metrics | {"step": step}, self.config.ranking_metric)


def worker_environment(config: Config, threads: int | None = None) -> dict[str, str]:
    """Return the environment variables of a process with an engine. Set them before torch and vLLM are imported.

    Args:
        threads: compute threads of the process; None: `cluster.threads_per_worker`.
    """
    environment = {
        "TOKENIZERS_PARALLELISM": "false",  # forking is unsafe once the tokenizer has started threads
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        **device_environment(config.cluster.use_gpu),
    }
    if threads or config.cluster.threads_per_worker:
        environment["OMP_NUM_THREADS"] = str(threads or config.cluster.threads_per_worker)
    if config.engine.compile_cache is not None:
        environment["VLLM_CACHE_ROOT"] = config.engine.compile_cache
    if config.sampling.processing or config.sampling.structured_outputs:
        # The sampler of vLLM's second model runner does not provide unprocessed log-probabilities, and its masks of
        # structured outputs are not tested.
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if config.sampling.structured_outputs:
        # vLLM would give up on a regular expression after a few seconds of wall time, even one that is merely slowed
        # down by a busy machine.
        environment["VLLM_REGEX_COMPILATION_TIMEOUT_S"] = "0"
    if compute_device(config.cluster.use_gpu) == "cpu":
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(config.engine.cpu_cache_gib),
            # By default vLLM binds every engine of a node to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # By default vLLM rounds the inputs of layers in four bits to 8 bits, on CPUs with AMX.
            "VLLM_CPU_INT4_W4A8": "0",
            # vLLM's sampler would compile a small C++ helper: 17 s on the first token, with no gain.
            "TORCH_COMPILE_DISABLE": "1",
            # A warm server (driver/cluster/warm_start.py) must import numpy without starting threads. Also set without
            # a warm server, so that results do not depend on it. torch's matrix products use MKL and are not affected.
            "OPENBLAS_NUM_THREADS": "1",
        }
    return environment


def solve_shard(
    problems: list[Problem],
    config: Config,
    model_path: str,
    recorded: Collection[str],
    limits_template: bool = False,
) -> list[dict[str, Any]]:
    """Start an engine, solve a part of the problems, and score the completions. Runs as a Ray task.

    Args:
        recorded: ids of the problems whose texts are returned.
        limits_template: render the policy's chat template in a process with limits.

    Returns:
        A row for each problem, as `score_completions` returns it, in the order of the problems.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in the task's process
    # For an engine with several processes: vLLM forks by default, and a Ray process has threads, which a fork loses.
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    from vllm import LLM

    from grpo_ray.evaluation.solve import solve_problems
    from grpo_ray.inference.arguments import llm_arguments, request_parameters
    from grpo_ray.inference.conversation_source import conversation_source
    from grpo_ray.inference.sampling import Completion, completion_of
    from grpo_ray.models.adapter_folders import merged_policy_path
    from grpo_ray.models.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory(prefix="grpo_ray-") as scratch:
        path = merged_policy_path(model_path, config, scratch)
        tokenizer = load_tokenizer(path, config.model.trust_remote_code, limits_template)
        llm = LLM(
            **llm_arguments(path, config),
            **parallel_arguments(engine_processes(config)),
            gpu_memory_utilization=engine_memory(config),
        )

    def run_requests(
        prompts: list[list[int]],
        sampling: list[dict[str, Any]],
        on_finished: Callable[[int, list[int]], None] = lambda index, token_ids: None,
    ) -> list[Completion]:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            # `flat_logprobs` is the form that `completion_of` reads; only rollout functions request log-probabilities.
            sampling_params=[request_parameters(arguments) for arguments in sampling],
            use_tqdm=False,
        )
        completions = [completion_of(output) for output in outputs]
        for index, completion in enumerate(completions):
            on_finished(index, completion.token_ids)
        return completions

    with ExitStack() as stack:
        converse = None
        facts = llm.llm_engine.model_config
        source = conversation_source(
            config, tokenizer, max_model_len=facts.max_model_len, vocabulary_size=facts.get_vocab_size()
        )
        if source is not None:
            stack.callback(source.close)
            converse = partial(source.sample, generate=run_requests)
        columns = solve_problems(problems, config, tokenizer, run_requests, recorded, converse)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def engine_memory(config: Config) -> float:
    """Return the part of a GPU's memory that an evaluation's engine takes: 0.9, minus that of reward models there."""
    beside = reward_model_memory(config) / gpu_bytes() if config.reward_model_share_of_engines else 0
    return 0.9 - beside


def parallel_arguments(processes: int) -> dict[str, Any]:
    """Return the arguments of `vllm.LLM` for an engine of several processes on this node; none for a single one."""
    if processes == 1:
        return {}
    # Not vLLM's Ray executor, which would wait for the GPUs that this task already holds.
    return {"tensor_parallel_size": processes, "distributed_executor_backend": "mp"}
