"""Observations of a real engine and a real learner in one process, for `test_engine.py`."""

import itertools
import tempfile
from typing import Any

from lone_process import lone_process_group


@lone_process_group()
def observe(policy: str) -> dict[str, Any]:
    """Start an engine and a learner with the policy; return the values that the tests compare, by name."""
    import sampled
    import torch
    from vllm.model_executor.layers.linear import LinearBase

    from grpo_ray.config.loader import load_config
    from grpo_ray.data.arithmetic import arithmetic_problems
    from grpo_ray.errors import DataError, SyncError
    from grpo_ray.inference import cpu_packing
    from grpo_ray.inference.engine import Engine
    from grpo_ray.inference.sampling import ignore_finished
    from grpo_ray.learner.learner import build_learner
    from grpo_ray.models.tokenizer import tokenize_prompts

    config = load_config(None, [f"model.path={policy}", "grpo.max_completion_length=24", "cluster.num_workers=1"])
    learner = build_learner(config, model_path=policy, output_dir=tempfile.mkdtemp(), problems=[])
    engine = learner.engine
    observed: dict[str, Any] = {}

    def sample(prompts: list[list[int]], seeds: list[int]) -> tuple[list[list[int]], list[list[float | None]]]:
        return sampled.sample(engine, prompts, seeds)

    def gap(prompts: list[list[int]], completions: list[list[int]], logprobs: list[list[float | None]]) -> float:
        """Return the largest gap between engine and learner; the learner computes one sequence at a time."""
        largest = 0.0
        for prompt, completion, logps in zip(prompts, completions, logprobs, strict=True):
            batch = {
                "prompt_ids": torch.tensor([prompt]),
                "completion_ids": torch.tensor([completion]),
                "prompt_mask": torch.ones(1, len(prompt), dtype=torch.long),
                "completion_mask": torch.ones(1, len(completion), dtype=torch.long),
            }
            largest = max(largest, (learner.logps(batch)[0] - torch.tensor(logps)).abs().max().item())
        return largest

    heldout = itertools.islice(arithmetic_problems("heldout"), 12)
    prompts = tokenize_prompts(learner.processing_class, [problem.prompt for problem in heldout], {})
    seeds = list(range(100, 112))
    engine.sync_weights()
    completions, logprobs = sample(prompts, seeds)
    observed["whole"] = completions, logprobs
    reversed_order = sample(prompts[::-1], seeds[::-1])
    observed["reversed"] = reversed_order[0][::-1], reversed_order[1][::-1]
    parts = [sample(prompts[i : i + 5], seeds[i : i + 5]) for i in range(0, 12, 5)]
    observed["parts"] = [c for part in parts for c in part[0]], [p for part in parts for p in part[1]]
    observed["other seeds"] = sample(prompts, [seed + 1 for seed in seeds])
    observed["gap"] = gap(prompts, completions, logprobs)

    # The first token of many completions of one prompt, and the learner's probability of each token.
    many = [sample([prompts[0]] * 100, list(range(first, first + 100)))[0] for first in range(0, 2000, 100)]
    observed["first tokens"] = [completion[0] for batch in many for completion in batch]
    with torch.no_grad():
        logits = learner.model(torch.tensor([prompts[0]])).logits[0, -1]
    observed["first probabilities"] = (logits.double() / learner.args.temperature).softmax(-1).tolist()

    def run(sampling: list[dict[str, Any]]) -> list[list[int]]:
        return [each.token_ids for each in engine.run_requests(prompts, sampling)]

    unseeded: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "logprobs": 0}
    seeded = [unseeded | {"seed": seed} for seed in seeds]
    observed["greedy"] = run([unseeded | {"temperature": 0.0}] * 12)
    observed["mixed"] = run([unseeded | {"temperature": 0.0}] * 6 + seeded[6:])
    # Filters that leave one token only, mixed with requests without a filter.
    one_token: list[dict[str, Any]] = [{}, {"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}]
    observed["filtered"] = run([each | one_token[i % 4] for i, each in enumerate(seeded)])
    observed["filtered, unseeded"] = run([unseeded | one_token[1 + i % 3] for i in range(12)])

    texts = learner.processing_class.batch_decode(completions, skip_special_tokens=True)
    frequent = max("0123456789", key="".join(texts).count)
    engine.training_sampling |= {"stop": [frequent], "detokenize": True}
    stopped = learner.processing_class.batch_decode(sample(prompts, seeds)[0], skip_special_tokens=True)
    engine.training_sampling |= {"stop": [], "detokenize": False}
    observed["stopped"] = frequent, stopped, texts

    # Prompts with more tokens in total than one pass of the engine processes.
    long = [prompts[0] * 100, prompts[1] * 90, prompts[2] * 80, prompts[3] * 70]
    observed["long lengths"] = [len(prompt) for prompt in long]
    observed["long gap"] = gap(long, *sample(long, seeds[:4]))
    try:
        sample([[5] * engine.max_model_len], [1])
    except DataError as error:
        observed["too long"] = str(error)

    with engine.heldout_rounds() as run_round:
        run_round(long[:1], [{"max_tokens": 24}], ignore_finished)
    sampling = [{"max_tokens": 1, "seed": seed} for seed in range(3)]
    sharing = engine._complete([long[0]] * 3, sampling, slice(0, 3), ignore_finished)
    observed["cached tokens"] = [output.num_cached_tokens for output in sharing]

    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    observed["stale gap"] = gap(prompts, *sample(prompts, seeds))
    engine.sync_weights()
    observed["fresh gap"] = gap(prompts, *sample(prompts, seeds))
    # Long enough for whole blocks of the prefix cache, which were computed with the weights before.
    observed["long fresh gap"] = gap(long, *sample(long, seeds[:4]))

    is_faster_packed = cpu_packing.is_faster_packed
    cpu_packing.is_faster_packed = lambda weight: True  # the policy's layers are too small to be packed otherwise
    engine.sync_weights()
    observed["packed gap"] = gap(prompts, *sample(prompts, seeds))
    with torch.no_grad():
        for layer in engine._repackable_layers:
            if isinstance(layer, LinearBase):  # the embedding is not packed
                layer.weight.mul_(2)
    observed["copies gap"] = gap(prompts, *sample(prompts, seeds))
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    observed["packed stale gap"] = gap(prompts, *sample(prompts, seeds))
    engine.sync_weights()
    observed["packed fresh gap"] = gap(prompts, *sample(prompts, seeds))
    cpu_packing.is_faster_packed = is_faster_packed

    iter_named_params = Engine._iter_named_params
    Engine._iter_named_params = lambda self: (  # type: ignore[method-assign]
        (name, weight) for name, weight in iter_named_params(self) if "layers.1.mlp.down_proj" not in name
    )
    try:
        engine.sync_weights()
    except SyncError as error:
        observed["withheld"] = str(error)
    finally:
        Engine._iter_named_params = iter_named_params  # type: ignore[method-assign]

    ones = torch.ones(2, 3)
    for name, difference in {"equal": 0.0, "small": 0.0005, "large": 0.01, "not a number": float("nan")}.items():
        try:
            proven = engine.prove_sync(ones + difference, ones, torch.tensor([[1, 1, 0], [1, 0, 0]]), step=7)
            observed[name] = (proven.mean, proven.max, proven.tokens)
        except SyncError as error:
            observed[name] = str(error)
    return observed
