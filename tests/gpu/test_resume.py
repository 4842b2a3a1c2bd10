"""Kill and resume on a GPU.

On the CPU a resumed run ends with the same bits. On a GPU, the backward pass of attention adds in an order that
differs from run to run, so two runs differ even if neither is killed. These tests check what holds all the same: no
problem is lost or used twice, and the weights that a run continues with are those of the checkpoint, bit for bit.
"""

from typing import Any

from faulty_runs import outcome_of, same
from small_runs import events_of, same_weights

from grpo_ray.resilience.chaos import Fault


def used_problems(outcome: dict[str, Any]) -> list[tuple[int, int, str]]:
    """Return step, epoch and problem of each group of a run, in order."""
    return sorted((group["step"], group["epoch"], group["problem"]) for group in outcome["groups"])


def test_killed_run_resumes_with_the_weights_of_its_checkpoint(machine: Any) -> None:
    whole = outcome_of(machine.whole)
    # Killed as soon as a checkpoint is complete: writing one takes longer than several steps of this policy, and a
    # worker that is killed meanwhile begins again at the checkpoint before.
    folder = machine.train("killed", *machine.steps, faults=[Fault("kill-commit", step=2)])
    killed = outcome_of(folder)
    assert [event["step"] for event in events_of(folder, "began")] == [0, 2]
    assert used_problems(killed) == used_problems(whole)
    assert killed["ledger"] == whole["ledger"]
    print(f"bit-identical with the run that was not killed: {same_weights(killed['weights'], whole['weights'])}")
    if machine.dry:
        same(killed, whole)
    # Two more steps that move nothing: a weight that differs afterwards was not restored exactly.
    still = outcome_of(machine.train("killed", *machine.steps, "grpo.max_steps=6", "grpo.learning_rate=0"))
    assert [event["step"] for event in events_of(folder, "began")] == [0, 2, 4]
    assert len(used_problems(still)) > len(used_problems(killed))
    assert same_weights(still["weights"], killed["weights"])
