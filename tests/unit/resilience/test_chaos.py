"""Tests of the description of planned faults. Plans and injection: tests/fault_injection/test_chaos.py."""

from grpo_ray.resilience.chaos import Fault, describe_plan


def test_describe_plan_names_each_fault_and_the_wait_for_a_hang() -> None:
    assert describe_plan([Fault("kill-backward", step=3, rank=1), Fault("hang", step=9)], hang_seconds=60) == [
        "fault in step 3, worker 1: SIGKILL in the backward pass",
        "fault in step 9, worker 0: a reward function never returns",
        "the hang ends when the watchdog notices it, after run.hang_seconds=60 or, if that is longer, run.hang_factor "
        "times the usual longest pause without progress",
    ]


def test_describe_plan_without_hang_waits_for_nothing() -> None:
    assert len(describe_plan([Fault("exception", step=3)], hang_seconds=60)) == 1
