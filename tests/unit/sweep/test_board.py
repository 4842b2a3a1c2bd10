"""Tests of the actor between a sweep and the drivers of its trials, called as a plain object."""

from grpo_ray.sweep.board import SweepBoard, TrialActivity


def test_trial_takes_no_steps_from_its_launch_until_training_begins() -> None:
    board = SweepBoard()
    seen = []
    board.begin("a")
    seen.append(board.read()[0]["a"].takes_no_steps)
    for takes_steps in (False, True, False, True):  # workers have begun, train, have failed, train again
        board.set_takes_steps("a", takes_steps)
        seen.append(board.read()[0]["a"].takes_no_steps)
    board.add_step("a", 3, {"reward/mean": 0.5})
    board.add_line("a", "step 3/8")
    assert seen == [True, True, False, True, False]
    assert board.read()[0]["a"] == TrialActivity("step 3/8", 3, {"reward/mean": 0.5}, takes_no_steps=False)
    board.begin("a")  # the next launch
    assert board.read()[0]["a"].takes_no_steps


def test_new_board_knows_no_trial_that_takes_no_steps() -> None:
    """Ray starts a board that has died anew, without its activities: a trial may be in the middle of a step."""
    board = SweepBoard()
    board.add_line("a", "step 3/8")
    assert not board.read()[0]["a"].takes_no_steps
