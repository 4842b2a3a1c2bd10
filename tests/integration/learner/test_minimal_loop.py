"""The loop with which the page on the architecture begins, on a real engine and a real learner."""

from pathlib import Path

import pytest
from documents import blocks
from worker_tasks import call_in_worker


def test_loop_of_the_page_trains(cluster: None, policy: Path) -> None:
    from minimal_loop import run_loop

    [loop] = [each.text for each in blocks("python") if each.source == "docs/architecture.md"]
    assert len([line for line in loop.splitlines() if line]) <= 30
    sizes = ["cluster.num_workers=1", "grpo.prompts_per_step=2", "grpo.num_generations=4", "grpo.max_steps=3"]
    settings = ["rewards.functions=['reward_spies:vary']", "grpo.learning_rate=1e-3", "grpo.micro_batch_size=8"]
    observed = call_in_worker(run_loop, loop, str(policy), [*sizes, *settings])
    assert observed["steps"] == 3 and observed["proofs"] == 3
    assert len(observed["gaps"]) == 3 and max(observed["gaps"]) < 1e-4
    assert observed["moved"] == pytest.approx(3e-3, rel=0.5)  # AdamW moves each weight by about the learning rate
