"""Evaluation of a policy on held-out problems with vLLM engines in Ray Data tasks: pass@1, pass@k and maj@k."""

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from grpo_ray.config.schema import Config
from grpo_ray.data.stream import Split, from_row, to_row
from grpo_ray.device import compute_device, device_environment
from grpo_ray.evaluation.metrics import EvaluationResult, heldout_metrics, summarize_sets, unique_problems
from grpo_ray.storage.checkpoints import MEASURED, checkpoint_score
from grpo_ray.storage.run_folder import RunFolder

MIN_PROBLEMS_PER_ENGINE = 2_000
"""With fewer problems per engine, starting another engine takes longer than it saves."""


def evaluate(
    config: Config,
    model_path: str,
    splits: Mapping[str, Split],
    *,
    on_progress: Callable[[str], None] = lambda activity: None,
) -> dict[str, EvaluationResult]:
    """Evaluate a policy on held-out sets. Ray must be connected.

    Args:
        model_path: local folder, URI or hub id of a policy or an adapter.
        splits: key of a held-out set -> its problems.
        on_progress: called with the current activity, for the progress line.

    Returns:
        Key of a held-out set -> its evaluation.
    """
    on_progress("starting an engine to measure with")
    sets = {key: list(split.read()) for key, split in splits.items()}
    problems = unique_problems(sets)
    dataset = ray.data.from_items([to_row(problem, epoch=0) for problem in problems])
    engines = max(1, min(config.cluster.max_workers, len(problems) // MIN_PROBLEMS_PER_ENGINE))
    cpus = config.cluster.cpus_per_worker
    # One block per engine: a task starts its engine, solves its block and ends.
    rows = dataset.repartition(engines).map_batches(
        solve_block,
        fn_kwargs={"config": config, "model_path": model_path},
        batch_size=None,
        batch_format="numpy",
        zero_copy_batch=False,
        max_calls=1,  # the process ends with its engine
        num_gpus=1 if config.cluster.use_gpu else 0,
        num_cpus=cpus,
        # Ray would set the same number of threads, but too late: a warm server has already imported the libraries.
        runtime_env={"env_vars": worker_environment(config, config.cluster.threads_per_worker or max(1, int(cpus)))},
    )
    return summarize_sets(rows.take_all(), sets, config.heldout.num_samples)


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
    """Handle of the `RunCoordinator` actor, which receives the result for the step's row in `metrics.jsonl`."""

    def __call__(self, checkpoint: Any, step: int) -> dict[str, float]:
        """Evaluate a checkpoint of Ray Train; return the metrics that Ray Train adds to those of its report.

        Args:
            checkpoint: a `ray.train.Checkpoint`.
            step: the checkpoint's step.
        """
        name = checkpoint.path.rstrip("/").rpartition("/")[2]
        metrics = heldout_metrics(
            evaluate(self.config, self.folder.address_of(name), self.splits), self.config.primary_heldout
        )
        # In a file of its own, since the manifest is already written and Ray's record may be lost.
        self.folder.write_json({"metrics": metrics, "measured_on": self.measured_on}, name, MEASURED)
        ray.get(self.coordinator.record_event.remote("measured", step=step, metrics=metrics))
        return metrics | checkpoint_score(metrics | {"step": step}, self.config.ranking_metric)


def worker_environment(config: Config, threads: int | None = None) -> dict[str, str]:
    """Return the environment variables of a process with an engine. Set them before torch and vLLM are imported.

    Args:
        threads: compute threads of the process; None takes `cluster.threads_per_worker`.
    """
    environment = {
        "TOKENIZERS_PARALLELISM": "false",  # forking is unsafe once the tokenizer has started threads
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        **device_environment(),
    }
    if threads or config.cluster.threads_per_worker:
        environment["OMP_NUM_THREADS"] = str(threads or config.cluster.threads_per_worker)
    if config.sampling.processing:
        # The sampler of vLLM's second model runner has no place for unprocessed log-probabilities.
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"
    if compute_device(config.cluster.use_gpu) == "cpu":
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(config.engine.cpu_cache_gib),
            # By default vLLM binds every engine of a node to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # vLLM's sampler would compile a small C++ helper: 17 s on the first token, with no gain.
            "TORCH_COMPILE_DISABLE": "1",
            # A warm server (driver/warm_start.py) must import numpy without threads. Set without a warm server too, so
            # that results do not depend on it. torch's matrix products use MKL and are not affected.
            "OPENBLAS_NUM_THREADS": "1",
        }
    return environment


def solve_block(batch: dict[str, Any], *, config: Config, model_path: str) -> dict[str, Any]:
    """Start an engine, solve a block of problems, and score the completions (a function for `map_batches`).

    Args:
        batch: columns of problems, see `data.stream.to_row`.

    Returns:
        Columns of `score_completions`.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine runs in the task's process
    from vllm import LLM, SamplingParams

    from grpo_ray.evaluation.solve import solve_problems
    from grpo_ray.inference.arguments import llm_arguments
    from grpo_ray.inference.sampling import Completion, completion_of
    from grpo_ray.models.lora import merged_policy_path
    from grpo_ray.models.tokenizer import load_tokenizer

    with tempfile.TemporaryDirectory(prefix="grpo_ray-") as scratch:
        path = merged_policy_path(model_path, config, scratch)
        tokenizer = load_tokenizer(path, config.model.trust_remote_code)
        llm = LLM(
            **llm_arguments(path, config),
            gpu_memory_utilization=0.9,  # nothing else uses this GPU
        )

    def run_requests(prompts: list[list[int]], sampling: list[dict[str, Any]]) -> list[Completion]:
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts],
            sampling_params=[SamplingParams(**arguments) for arguments in sampling],
            use_tqdm=False,
        )
        return [completion_of(output) for output in outputs]

    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    return solve_problems([from_row(row) for row in rows], config, tokenizer, run_requests)
