"""Solving of held-out problems: from problems to scored completions, with any engine."""

import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

from grpo_ray.config.schema import Config
from grpo_ray.data.problem import Problem
from grpo_ray.evaluation.metrics import score_completions
from grpo_ray.inference.arguments import request_seed
from grpo_ray.inference.sampling import Completion, heldout_sampling
from grpo_ray.models.tokenizer import tokenize_prompts
from grpo_ray.rewards.registry import heldout_reward

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

RunRequests = Callable[[list[list[int]], list[dict[str, Any]]], list[Completion]]
"""Function that generates one completion per prompt, (B,) token ids, with (B,) arguments of `vllm.SamplingParams`."""


def solve_problems(
    problems: Sequence[Problem],
    config: Config,
    tokenizer: "PreTrainedTokenizerBase",
    run_requests: RunRequests,
    recorded: Collection[str] = (),
) -> dict[str, list[Any]]:
    """Generate `heldout.num_samples` completions for each problem, and score them.

    Prompts and sampling are training's, except for `heldout.temperature`. A completion's seed follows from `run.seed`,
    the problem and the completion's index, so the result does not depend on the process that solves a problem.

    Args:
        recorded: ids of the problems whose texts are returned.

    Returns:
        Columns with one row per problem, as `score_completions` returns them.
    """
    started, samples = time.perf_counter(), range(config.heldout.num_samples)
    prompts = tokenize_prompts(tokenizer, [problem.prompt for problem in problems], config.chat_template_kwargs)
    sampling = heldout_sampling(config)
    completions = run_requests(
        [prompt for prompt in prompts for _ in samples],
        [
            sampling | {"seed": request_seed(config.run.seed, problem.id, 0, index)}
            for problem in problems
            for index in samples
        ],
    )
    texts = tokenizer.batch_decode([completion.token_ids for completion in completions], skip_special_tokens=True)
    return score_completions(problems, texts, completions, heldout_reward(config.rewards), started, recorded)
