"""Gaps between a real engine and a real learner under each sampling option, for `test_sampling_options.py`."""

import itertools
import json
import tempfile
from dataclasses import replace
from typing import Any

from lone_process import lone_process_group

COMBINATIONS: dict[str, dict[str, Any]] = {
    "temperature only": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 5},
    "min_p": {"min_p": 0.1},
    "repetition_penalty": {"repetition_penalty": 1.2},
    "presence_penalty": {"presence_penalty": 0.5},
    "frequency_penalty": {"frequency_penalty": 0.5},
    "logit_bias": {"logit_bias": {5: 2.0}},
    "allowed_token_ids": {"allowed_token_ids": list(range(12))},
    "bad_words": {"bad_words": ["7"]},
    "min_tokens": {"min_tokens": 20},
    "all filters": {"top_p": 0.9, "top_k": 5, "min_p": 0.1},
    "filters and penalties": {"top_p": 0.9, "top_k": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
}
"""Name -> arguments of `vllm.SamplingParams`, all at the temperature 0.8."""

FORM = {"regex": "[1-4]{2,9}(,[5-9]+)?"}
FORMED: dict[str, dict[str, Any]] = {
    "regex": {"structured_outputs": FORM},
    "regex and filters": {"structured_outputs": FORM, "top_p": 0.9, "repetition_penalty": 1.2},
    "choice": {"structured_outputs": {"choice": ["12", "345", "3456"]}},
    "json": {"structured_outputs": {"json": {"type": "integer", "minimum": 5, "maximum": 5000}}},
    "any json": {"structured_outputs": {"json": {}}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= term "+" term | [5-9]\nterm ::= [1-4] | "90"'}},
}
"""The same, for completions of a form."""


@lone_process_group()
def measure_gaps(policy: str, dtype: str = "float32", formed: bool = False) -> dict[str, dict[str, Any]]:
    """Start an engine and a learner with the policy; return the observations of each combination, by name.

    The combinations are those of FORMED if `formed`, or of COMBINATIONS.

    Each has the mean gap in nats with right weights, with stale ones (`stale`), of the processed log-probabilities with
    right weights (`processed`), what the proof raises (`raised`, `stale raised`), and two runs' completions.
    """
    import torch
    from sampled import complete

    from grpo_ray.config.loader import load_config
    from grpo_ray.data.arithmetic import arithmetic_problems
    from grpo_ray.errors import SyncError
    from grpo_ray.learner.learner import build_learner
    from grpo_ray.learner.rollouts.rollout import Completions
    from grpo_ray.models.tokenizer import tokenize_prompts

    overrides = ["grpo.max_completion_length=24", "cluster.num_workers=1", "grpo.temperature=0.8", "grpo.top_p=0.9"]
    config = load_config(
        None,
        [
            f"model.path={policy}",
            f"model.dtype={dtype}",
            "grpo.vllm_importance_sampling_mode=token_truncate",
            *overrides,
            *([f"rollout.structured_outputs={json.dumps(FORM)}"] if formed else []),
        ],
    )
    learner = build_learner(config, model_path=policy, output_dir=tempfile.mkdtemp(), problems=[])
    engine, padding = learner.engine, learner.collector.padding
    plain: dict[str, Any] = {"temperature": 0.8, "max_tokens": 24, "detokenize": False, "logprobs": 1}
    combinations = COMBINATIONS
    if formed:
        combinations = FORMED
    heldout = itertools.islice(arithmetic_problems("heldout"), 12)
    prompts = tokenize_prompts(learner.processing_class, [problem.prompt for problem in heldout], {})
    engine.sync_weights()

    def observe(options: dict[str, Any]) -> dict[str, Any]:
        engine.training_sampling = plain | options
        sampled = complete(engine, prompts, range(12))
        completions = [each.token_ids for each in sampled]
        logps, before = [each.logps for each in sampled], [each.unprocessed_logps for each in sampled]
        batch = padding.columns(Completions(prompts, completions, logps, before))
        with learner.accelerator.autocast():  # which training wraps the model in
            learner_logps, mask = learner.logps(batch), batch["completion_mask"]
        if formed:  # every way of reading rows takes the masks in its own order
            for shift in (False, True):
                learner.savings = replace(learner.savings, shift=shift, pack=False, head=shift)
                with learner.accelerator.autocast():
                    torch.testing.assert_close(learner.logps(batch) * mask, learner_logps * mask)
        unprocessed, processed = batch["unprocessed_per_token_logps"], batch["sampling_per_token_logps"]
        observed: dict[str, Any] = {
            "completions": completions,
            "texts": learner.processing_class.batch_decode(completions, skip_special_tokens=True),
            "gap": ((learner_logps - unprocessed).abs() * mask).sum().item() / mask.sum().item(),
            "processed": ((learner_logps - processed).abs() * mask).sum().item() / mask.sum().item(),
            "raised": "",
        }
        try:
            engine.prove_sync(learner_logps, unprocessed, mask, step=0)
        except SyncError as error:
            observed["raised"] = str(error)
        return observed

    found = {name: observe(options) for name, options in combinations.items()}
    again = {name: observe(options) for name, options in reversed(combinations.items())}
    with torch.no_grad():
        for parameter in learner.model.parameters():
            parameter.add_(0.002 * torch.randn_like(parameter))  # as far as a few optimizer steps
    for name, options in combinations.items():
        stale = observe(options)
        found[name] |= {
            "again": again[name]["completions"], "stale": stale["gap"], "stale raised": stale["raised"],
            "stale completions": stale["completions"],
        }  # fmt: skip
    return found
