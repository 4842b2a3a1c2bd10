"""The loop with which docs/architecture.md begins, run as it is printed, for `test_minimal_loop.py`."""

import tempfile
from typing import Any

from lone_process import lone_process_group


@lone_process_group()
def run_loop(code: str, policy: str, overrides: list[str]) -> dict[str, Any]:
    """Run the loop; return its steps, the proofs of the sync, and how far the weights have moved."""
    from transformers import AutoModelForCausalLM

    from grpo_ray.config.loader import load_config

    names: dict[str, Any] = {
        "config": load_config(None, [f"model.path={policy}", *overrides]),
        "policy": policy,
        "folder": tempfile.mkdtemp(),
    }
    exec(compile(code, "docs/architecture.md", "exec"), names)
    learner = names["learner"]
    before = dict(AutoModelForCausalLM.from_pretrained(policy).named_parameters())
    moved = max((each - before[name]).abs().max().item() for name, each in learner.model.named_parameters())
    return {
        "steps": learner.state.global_step,
        "proofs": learner.engine.proofs,
        "gaps": list(learner._metrics["train"]["engine/logprob_gap_mean"]),
        "moved": moved,
    }
