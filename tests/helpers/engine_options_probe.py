"""Observations of engines with arguments in `engine.vllm`, for `test_engine_options.py`."""

import itertools
import tempfile
from typing import Any

from lone_process import lone_process_group


def observe(policy: str) -> dict[str, Any]:
    """Start engines of evaluation and of training; return the values that the tests compare, by name."""
    from grpo_ray.data.arithmetic import arithmetic_problems

    settings = [f"model.path={policy}", "grpo.max_completion_length=24", "cluster.num_workers=1"]
    problems = list(itertools.islice(arithmetic_problems("heldout"), 12))
    return observe_evaluation(policy, settings, problems) | observe_training(policy, settings, problems)


def observe_evaluation(policy: str, settings: list[str], problems: list[Any]) -> dict[str, Any]:
    """Return the error of an evaluation's engine that gets a refused argument; nothing without an error."""
    from grpo_ray.config.loader import load_config
    from grpo_ray.evaluation.evaluate import solve_shard

    try:
        solve_shard(problems, load_config(None, [*settings, "engine.vllm={max_num_batched_tokens: 16}"]), policy, ())
    except ValueError as error:  # vLLM requires more, which shows that the argument reached it
        return {"evaluation": str(error)}
    return {}


@lone_process_group()
def observe_training(policy: str, settings: list[str], problems: list[Any]) -> dict[str, Any]:
    """Return the observations of a learner's engine that quantizes its weights."""
    import torch
    from sampled import sample

    from grpo_ray.config.loader import load_config
    from grpo_ray.inference.sampling import ignore_finished
    from grpo_ray.learner.learner import build_learner
    from grpo_ray.models.tokenizer import tokenize_prompts

    observed: dict[str, Any] = {}
    own = "{quantization: int8_per_channel_weight_only, block_size: 64, enable_prefix_caching: false}"
    config = load_config(None, [*settings, "model.dtype=bfloat16", f"engine.vllm={own}"])
    learner = build_learner(config, model_path=policy, output_dir=tempfile.mkdtemp(), problems=[])
    engine = learner.engine
    used = engine.llm.llm_engine.vllm_config
    observed["block size"] = used.cache_config.block_size
    observed["description"] = engine.description
    prompts = tokenize_prompts(learner.processing_class, [problem.prompt for problem in problems], {})

    def mean_gap() -> float:
        """Return the mean gap between engine and learner; the learner computes one sequence at a time."""
        completions, logps = sample(engine, prompts, range(len(prompts)))
        total, tokens = 0.0, 0
        for prompt, completion, sampled in zip(prompts, completions, logps, strict=True):
            batch = {
                "prompt_ids": torch.tensor([prompt]),
                "completion_ids": torch.tensor([completion]),
                "prompt_mask": torch.ones(1, len(prompt), dtype=torch.long),
                "completion_mask": torch.ones(1, len(completion), dtype=torch.long),
            }
            gaps = (learner.logps(batch)[0] - torch.tensor(sampled)).abs()
            total, tokens = total + gaps.sum().item(), tokens + len(completion)
        return total / tokens

    engine.sync_weights()
    observed["gap"] = mean_gap()
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    observed["stale gap"] = mean_gap()
    engine.sync_weights()
    observed["fresh gap"] = mean_gap()
    sampling = [{"max_tokens": 1, "seed": seed} for seed in range(3)]
    sharing = engine._complete([prompts[0] * 20] * 3, sampling, slice(0, 3), ignore_finished)
    observed["cached tokens"] = [output.num_cached_tokens for output in sharing]
    return observed
