"""Greedy held-out measurement of a policy with transformers alone, without an engine and without Ray."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from grpo_ray.config.schema import Config
from grpo_ray.evaluation.metrics import EvaluationResult, summarize_evaluation

BATCH = 128
"""Prompts that are completed at once."""


def measure_greedily(policy: Path, config: Config) -> EvaluationResult:
    """Return the metrics of a policy's greedy completions of the config's held-out problems."""
    from grpo_ray.data.stream import open_splits
    from grpo_ray.evaluation.solve import solve_problems
    from grpo_ray.inference.conversation_sampler import ConversationSampler
    from grpo_ray.models.tokenizer import load_tokenizer

    _, heldout = open_splits(config)
    problems = list(heldout[config.primary_heldout].read())
    tokenizer = load_tokenizer(str(policy))
    generate = greedy_engine(policy, tokenizer)
    if not config.rollout.has_turns:
        columns = solve_problems(problems, config, tokenizer, generate)
    else:
        with ConversationSampler(config, tokenizer) as sampler:
            columns = solve_problems(
                problems, config, tokenizer, generate, converse=partial(sampler.sample, generate=generate)
            )
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    return summarize_evaluation(rows, num_samples=1)


def greedy_engine(policy: Path, tokenizer: Any) -> Callable[..., list[Any]]:
    """Return a function that completes prompts as an engine does, always with the likeliest token."""
    import torch
    from transformers import AutoModelForCausalLM

    from grpo_ray.inference.sampling import Completion

    model = AutoModelForCausalLM.from_pretrained(policy)

    def complete(prompts: list[list[int]], limits: list[int]) -> list[Completion]:
        inputs = tokenizer.pad({"input_ids": prompts}, return_tensors="pt")  # on the left
        width = inputs["input_ids"].shape[1]
        with torch.inference_mode():
            rows = model.generate(**inputs, do_sample=False, max_new_tokens=max(limits))[:, width:].tolist()
        completions = []
        for row, limit in zip(rows, limits, strict=True):
            ended = tokenizer.eos_token_id in row[:limit]
            length = row.index(tokenizer.eos_token_id) + 1 if ended else limit
            completions.append(Completion(row[:length], not ended, [], []))
        return completions

    def generate(
        prompts: list[list[int]],
        sampling: list[dict[str, Any]],
        on_finished: Callable[[int, list[int]], None] = lambda index, token_ids: None,
    ) -> list[Completion]:
        assert all(each["temperature"] == 0 for each in sampling)
        completions: list[Completion] = []
        for start in range(0, len(prompts), BATCH):
            part = slice(start, start + BATCH)
            completions += complete(prompts[part], [each["max_tokens"] for each in sampling[part]])
        for index, completion in enumerate(completions):
            on_finished(index, completion.token_ids)
        return completions

    return generate
