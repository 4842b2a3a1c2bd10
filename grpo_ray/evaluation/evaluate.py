"""How good is a policy: pass@1, pass@k and maj@k on held-out problems, by Ray Data over vLLM."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import ray

from grpo_ray.config.schema import Config
from grpo_ray.data.ledger import DatasetFingerprint
from grpo_ray.data.stream import Split, from_row, heldout_dataset
from grpo_ray.evaluation.confidence import heldout_metrics
from grpo_ray.evaluation.metrics import Evaluation, score_completions, summarize_evaluation
from grpo_ray.rewards.registry import heldout_reward
from grpo_ray.storage.checkpoints import MEASURED, checkpoint_score
from grpo_ray.storage.run_folder import RunFolder

PROBLEMS_PER_ENGINE = 2_000
"""Fewer problems than this are not worth the start of a second engine."""


def evaluate(
    config: Config,
    model_path: str,
    split: Split,
    *,
    num_samples: int = 1,
    say: Callable[[str], None] = lambda phase: None,
) -> Evaluation:
    """Measure a policy. Ray must be connected.

    model_path: local folder, URI or hub id.
    num_samples: completions of each problem; one is greedy, more are sampled at the run's temperature.
    """
    say("starting an engine to measure with")
    dataset = heldout_dataset(split)
    problems = dataset.count()
    engines = max(1, min(config.cluster.max_workers, problems // PROBLEMS_PER_ENGINE))
    # One block for each engine: a task starts its engine, solves its block and ends.
    cpus = config.cluster.cpus_per_worker
    rows = dataset.repartition(engines).map_batches(
        solve,
        fn_kwargs={"config": config, "model_path": model_path, "num_samples": num_samples},
        batch_size=None,
        batch_format="numpy",
        zero_copy_batch=False,
        max_calls=1,  # the process goes with its engine
        num_gpus=1 if config.cluster.use_gpu else 0,
        num_cpus=cpus,
        # As many threads as Ray would allow, but set before the libraries are imported: a warm server has done it.
        runtime_env={"env_vars": worker_environment(config, config.cluster.threads_per_worker or max(1, int(cpus)))},
    )
    return summarize_evaluation(rows.take_all(), num_samples)


@dataclass(frozen=True)
class Validation:
    """Measures a checkpoint on the held-out problems beside the training; Ray Train's `ValidationConfig.fn`."""

    config: Config
    folder: RunFolder
    split: Split
    measured_on: DatasetFingerprint
    """Contents of the split."""
    board: Any
    """Actor that hears of the result, so that it reaches the step's row in `metrics.jsonl`."""

    def __call__(self, checkpoint: Any, step: int) -> dict[str, float]:
        """Gives the metrics that are put to those of the checkpoint's report."""
        name = checkpoint.path.rstrip("/").rpartition("/")[2]
        path = checkpoint.path if self.folder.local else self.folder.uri_of(name)
        metrics = heldout_metrics(evaluate(self.config, path, self.split).pass_at_1)
        # Beside the manifest, which knows nothing of it: Ray's own record may be lost.
        self.folder.write_json({"metrics": metrics, "measured_on": asdict(self.measured_on)}, name, MEASURED)
        ray.get(self.board.happened.remote("measured", step=step, metrics=metrics))
        return metrics | checkpoint_score(metrics | {"step": step}, self.config.run.best_metric)


def worker_environment(config: Config, threads: int | None = None) -> dict[str, str]:
    """Environment of a process that holds an engine; it must stand before torch and vLLM are imported."""
    environment = {
        "TOKENIZERS_PARALLELISM": "false",  # a process that has threads must not fork for them
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TRL_EXPERIMENTAL_SILENCE": "1",
    }
    if threads or config.cluster.threads_per_worker:
        environment["OMP_NUM_THREADS"] = str(threads or config.cluster.threads_per_worker)
    if not config.cluster.use_gpu:
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": str(config.engine.cpu_cache_gib),
            # Left to itself, vLLM binds every engine of a node to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # vLLM's sampler compiles a small helper with C++: 17 s on the first token for nothing gained.
            "TORCH_COMPILE_DISABLE": "1",
            # A warm server (warm_start.py) must import numpy without threads; the same without one, so that results
            # do not depend on it. torch multiplies with MKL.
            "OPENBLAS_NUM_THREADS": "1",
        }
    return environment


def solve(batch: dict[str, Any], *, config: Config, model_path: str, num_samples: int) -> dict[str, Any]:
    """A stage of the Ray Data pipeline: start an engine, solve a block of problems, score what it says."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the task is the process; no second one beside it
    from vllm import LLM, SamplingParams

    from grpo_ray.inference.engine import llm_settings, request_seed
    from grpo_ray.models.lora import merged_policy_path
    from grpo_ray.models.tokenizer import load_tokenizer, tokenize_prompts

    with tempfile.TemporaryDirectory(prefix="grpo_ray-") as scratch:
        path = merged_policy_path(model_path, config, scratch)
        tokenizer = load_tokenizer(path, config.model.trust_remote_code)
        llm = LLM(
            **llm_settings(path, config.dtype, config.engine.max_context, config.model.trust_remote_code),
            gpu_memory_utilization=0.9,  # nothing else is on this GPU
        )
    reward = heldout_reward(config.rewards)
    rows = [dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True)]
    problems = [from_row(row) for row in rows]
    k = num_samples
    sampling = [
        SamplingParams(
            temperature=0.0 if k == 1 else float(config.grpo.trl.get("temperature", 1.0)),
            top_p=1.0 if k == 1 else float(config.grpo.trl.get("top_p", 1.0)),
            max_tokens=config.grpo.max_completion_length,
            seed=request_seed(config.run.seed, problem.id, 0, index),
            detokenize=False,
        )
        for problem in problems
        for index in range(k)
    ]
    prompts = tokenize_prompts(tokenizer, [problem.prompt for problem in problems])
    begun = time.perf_counter()
    outputs = llm.generate(
        [{"prompt_token_ids": ids} for ids in prompts for _ in range(k)], sampling_params=sampling, use_tqdm=False
    )
    texts = tokenizer.batch_decode([output.outputs[0].token_ids for output in outputs], skip_special_tokens=True)
    truncated = [output.outputs[0].finish_reason == "length" for output in outputs]
    return score_completions(problems, texts, truncated, reward, begun)
