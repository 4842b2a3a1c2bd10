"""Generation one step ahead, in a thread of its own with a CUDA stream of its own."""

from typing import Any

from small_runs import rows_of


def test_ahead_generates_the_completions_of_the_main_thread(machine: Any) -> None:
    observed = machine.probe("ahead", "grpo.generate_ahead=true")
    assert machine.dry or observed["model runner"] == 2
    assert observed["gap"]["proven"]
    assert observed["passes of the learner meanwhile"] >= 1
    if observed["repeated"]:  # the engine is deterministic for the same batch
        assert observed["same completions"] == 1.0


def test_run_with_generate_ahead_proves_each_sync(machine: Any) -> None:
    folder = machine.train("ahead", "grpo.generate_ahead=true", "grpo.max_steps=4", "grpo.save_steps=4")
    rows = [row for row in rows_of(folder) if "engine/logprob_gap_mean" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert max(row["engine/logprob_gap_mean"] for row in rows) < 0.05
