"""Limits, progress and message of the hang watchdog. Its thread and exit: tests/integration/resilience."""

from grpo_ray.resilience.watchdog import Activity, HangTimeout, describe_hang


def test_timeout_is_multiple_of_median_per_activity() -> None:
    timeout = HangTimeout(factor=10, floor=5)
    assert timeout.usual_pause("step") == 0 and timeout.limit("step") == 5
    for seconds in (60, 1, 2, 2):  # the first step includes compilation
        timeout.record("step", seconds)
    assert timeout.usual_pause("step") == 2 and timeout.limit("step") == 20
    timeout.record("save", 0.1)
    assert timeout.limit("save") == 5  # 10 x 0.1 s is below the floor
    assert timeout.limit("step") == 20


def test_timeout_uses_last_twenty_pauses() -> None:
    timeout = HangTimeout(factor=2, floor=1)
    for seconds in [1] * 20 + [10] * 11:  # of the last 20, 11 paused for 10 s
        timeout.record("step", seconds)
    assert timeout.limit("step") == 20


def test_activity_long_first_step_with_progress_does_not_hang() -> None:
    """32,000 tokens at 10 tokens/s take 53 minutes, with a limit of 15."""
    step = Activity("a step", 1, limit=900, progressed_at=0)
    for token in range(32_000):
        now = 300 + token / 10  # compilation takes 5 minutes
        assert step.seconds_left(now) > 0
        assert step.observe(token, now)
    assert step.longest_pause == 300


def test_activity_same_progress_hangs_after_the_limit() -> None:
    step = Activity("a step", 7, limit=900, progressed_at=100)
    assert step.observe({0: 5, 1: 8}, 200)
    assert not step.observe({0: 5, 1: 8}, 1099)
    assert step.seconds_left(1099) == 1 and step.seconds_left(1100) == 0
    assert step.end(1100) == 900  # the pause that has not ended counts


def test_activity_progress_of_another_worker_counts() -> None:
    step = Activity("a step", 7, limit=900, progressed_at=0)
    step.observe({0: 5, 1: 8}, 0)
    assert step.observe({0: 5, 1: 9}, 890)  # worker 0 waits for worker 1, which still generates
    assert step.seconds_left(890) == 900


def test_describe_hang_names_limit_derivation_and_key() -> None:
    timeout = HangTimeout(factor=20, floor=900)
    step = Activity("a step", 7, timeout.limit("a step"), progressed_at=0)
    assert describe_hang(step, timeout, 905) == (
        "a step (step 7) hangs: no worker made progress (a token, a micro-batch, bytes of a checkpoint) for 905.0 s; "
        "the limit is 900.0 s, from run.hang_seconds=900; if nothing was wrong, raise run.hang_seconds"
    )
    timeout.record("a step", 100)
    step = Activity("a step", None, timeout.limit("a step"), progressed_at=0)
    assert (
        "the limit is 2000.0 s, from run.hang_factor=20 times the usual longest pause of 100.0 s; if nothing was wrong"
    ) in describe_hang(step, timeout, 2001)
