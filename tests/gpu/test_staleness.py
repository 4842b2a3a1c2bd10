"""Sampling of a round, in a thread of its own with a CUDA stream of its own."""

from typing import Any


def test_ahead_generates_the_completions_of_the_main_thread(machine: Any) -> None:
    observed = machine.probe("ahead", "rollout.max_staleness=1")
    assert machine.dry or observed["model runner"] == 2
    assert observed["gap"]["proven"]
    assert observed["passes of the learner meanwhile"] >= 1
    if observed["repeated"]:  # the engine is deterministic for the same batch
        assert observed["same completions"] == 1.0
