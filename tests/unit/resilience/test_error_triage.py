"""Tests of step times, and of errors that end a run because another attempt would raise them again."""

from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest

from grpo_ray.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LedgerError,
    NonFiniteError,
    RepeatedWorkerError,
    SupersededError,
    TrainingError,
)
from grpo_ray.resilience.error_triage import (
    FATAL_ERRORS,
    RepeatedErrorDetector,
    annotate_step,
    error_context,
    error_signature,
    raise_if_fatal,
    root_cause,
    step_of,
)
from grpo_ray.resilience.watchdog import HangTimeout


def test_pace_usual_time_is_median_of_kind() -> None:
    pace = HangTimeout(factor=10, floor=5)
    assert pace.usual("step") is None and pace.limit("step") == 5
    for seconds in (60, 1, 2, 2):  # the first step includes compilation
        pace.add("step", seconds)
    assert pace.usual("step") == 2 and pace.limit("step") == 20
    pace.add("save", 0.1)
    assert pace.limit("save") == 5  # 10 x 0.1 s is below the floor
    assert pace.limit("step") == 20


def test_pace_uses_last_twenty_times() -> None:
    pace = HangTimeout(factor=2, floor=1)
    for seconds in [1] * 20 + [10] * 11:  # of the last 20, 11 took 10 s
        pace.add("step", seconds)
    assert pace.limit("step") == 20


def broken_reward(value: int) -> None:
    raise ValueError(f"cannot score {value} at {object()!r}")


def other_reward(value: int) -> None:
    raise ValueError(f"cannot score {value} at {object()!r}")


def attempt(function: Callable[..., None], *args: Any, step: int) -> Exception:
    """Return the error as the controller receives it: raised and marked in a worker, then pickled."""
    try:
        function(*args)
    except Exception as error:
        annotate_step(error, step)
        sent = cloudpickle.loads(cloudpickle.dumps(error))
    assert sent.__traceback__ is None
    return sent


def wrapped(error: Exception) -> Exception:
    """Return the error in Ray Train's wrapper, pickled."""
    from ray.train.v2._internal.util import construct_user_exception_with_traceback

    try:
        raise error
    except Exception as raised:
        return cloudpickle.loads(cloudpickle.dumps(construct_user_exception_with_traceback(raised)))


def died() -> Exception:
    """Return Ray Train's error of a worker that was killed."""
    from ray.exceptions import ActorDiedError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    return WorkerHealthCheckFailedError("A worker health check failed.", failure=ActorDiedError())


def test_error_pickled_keeps_step_and_traceback() -> None:
    error = attempt(broken_reward, 5, step=12)
    assert step_of(error) == 12
    assert "grpo_ray step 12" in error.__notes__
    first, *frames = (error_signature(error) or "").splitlines()
    assert first == "builtins.ValueError: cannot score # at <object object at #>"
    assert frames[-1].endswith(":broken_reward") and __file__ in frames[-1]


def test_error_wrapped_by_ray_keeps_step_and_signature() -> None:
    error = attempt(broken_reward, 5, step=12)
    assert step_of(wrapped(error)) == 12
    assert error_signature(wrapped(error)) == error_signature(error)


def test_same_bug_repeated_error_raises_with_traceback() -> None:
    same_bug = RepeatedErrorDetector()
    same_bug.after_exception({0: attempt(broken_reward, 1, step=12)})
    with pytest.raises(RepeatedWorkerError, match="step 12") as ended:
        same_bug.after_exception({1: attempt(broken_reward, 2, step=12)})
    assert isinstance(ended.value, TrainingError)
    assert "in broken_reward" in str(ended.value) and "ValueError: cannot score 2" in str(ended.value)
    assert str(cloudpickle.loads(cloudpickle.dumps(ended.value))) == str(ended.value)


def test_same_bug_attempts_need_not_be_adjacent() -> None:
    same_bug = RepeatedErrorDetector()
    same_bug.after_exception({0: attempt(broken_reward, 1, step=12)})
    same_bug.after_exception({0: attempt(other_reward, 1, step=12)})
    same_bug.after_exception({0: died()})
    with pytest.raises(RepeatedWorkerError, match="step 12"):
        same_bug.after_exception({0: attempt(broken_reward, 1, step=12)})


def test_same_bug_other_step_place_or_type_is_new() -> None:
    same_bug = RepeatedErrorDetector()
    for function in (broken_reward, other_reward):
        for step in (1, 2):
            same_bug.after_exception({0: attempt(function, 1, step=step)})

    def raises(kind: type[Exception]) -> None:
        raise kind("no")

    for kind in (KeyError, NonFiniteError):
        same_bug.after_exception({0: attempt(raises, kind, step=1)})


def test_same_bug_one_attempt_reported_twice_counts_once() -> None:
    same_bug = RepeatedErrorDetector()
    first, second = (attempt(broken_reward, rank, step=3) for rank in range(2))
    same_bug.after_exception({0: first})
    same_bug.after_exception({0: cloudpickle.loads(cloudpickle.dumps(first)), 1: second})
    with pytest.raises(RepeatedWorkerError):
        same_bug.after_exception({1: attempt(broken_reward, 1, step=3)})


def test_same_bug_attempt_with_dead_worker_is_ignored() -> None:
    assert error_signature(died()) is None and step_of(died()) is None
    same_bug = RepeatedErrorDetector()
    for _ in range(3):
        same_bug.after_exception({0: attempt(broken_reward, 1, step=4), 1: died()})
    same_bug.after_exception({0: attempt(broken_reward, 1, step=4)})  # the first attempt that counts


def test_same_bug_unmarked_error_is_ignored() -> None:
    same_bug = RepeatedErrorDetector()
    for _ in range(3):
        same_bug.after_exception({0: ValueError("came from a thread of Ray's")})


GLOO = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:537] Read error [127.0.0.1]:31410: Connection reset by "
    "peer. This is typically caused by a remote worker hanging or bugs in the application."
)


LOST = [
    (RuntimeError, GLOO),
    (RuntimeError, "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5012"),
    (RuntimeError, "[gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation"),
    (RuntimeError, "Failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?"),
    (RuntimeError, "NCCL communicator was aborted on rank 1."),
    (RuntimeError, "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting"),
    (BrokenPipeError, "[Errno 32] Broken pipe"),
    (ConnectionRefusedError, "no"),
]


def all_reduce(kind: type[Exception], message: str) -> None:
    raise kind(message)


@pytest.mark.parametrize(("kind", "message"), LOST, ids=[message[-30:] for _, message in LOST])
def test_same_bug_lost_peer_error_is_ignored(kind: type[Exception], message: str) -> None:
    same_bug = RepeatedErrorDetector()
    for _ in range(3):  # at the same step, before Ray reports the killed worker
        same_bug.after_exception({0: attempt(all_reduce, kind, message, step=9)})
    same_bug.after_exception({0: attempt(all_reduce, kind, message, step=9), 1: attempt(broken_reward, 1, step=9)})
    with pytest.raises(RepeatedWorkerError, match="cannot score"):
        same_bug.after_exception({0: attempt(all_reduce, kind, message, step=9), 1: attempt(broken_reward, 1, step=9)})


def test_signature_task_error_has_one_actor_death_has_none() -> None:
    from ray.exceptions import ActorDiedError, RayTaskError

    def task_failed(cause: Exception) -> None:
        raise RayTaskError("f", 'File "task.py", line 3, in f', cause, "title", 1, "127.0.0.1").as_instanceof_cause()

    error = attempt(task_failed, ValueError("bad row 7"), step=2)
    assert step_of(error) == 2
    assert (error_signature(error) or "").startswith("builtins.ValueError: bad row #")
    assert error_signature(attempt(task_failed, ActorDiedError(), step=2)) is None


def test_marking_error_gets_step_and_is_raised() -> None:
    with pytest.raises(KeyError) as caught, error_context(lambda: 7):
        raise KeyError("a bug")
    assert step_of(caught.value) == 7


def test_marking_system_exit_is_not_marked() -> None:
    with pytest.raises(SystemExit) as caught, error_context(lambda: 7):
        raise SystemExit(1)
    assert step_of(caught.value) is None


def test_culprit_error_of_the_code_comes_before_deaths_and_lost_peers() -> None:
    cause = ValueError("bad reward")
    assert root_cause({0: ConnectionError("closed by peer"), 1: died(), 2: cause}) == (2, cause)
    death = died()
    assert root_cause({0: ConnectionError("closed by peer"), 1: death}) == (1, death)


@pytest.mark.parametrize(
    "kind", [NonFiniteError, CheckpointError, ConfigError, DataError, LedgerError, SupersededError]
)
def test_stop_for_good_error_no_attempt_can_mend_is_raised(kind: type[Exception]) -> None:
    error = kind("it would come again")
    with pytest.raises(kind) as raised:
        raise_if_fatal(wrapped(error))
    assert type(raised.value) is kind and kind in FATAL_ERRORS


def test_stop_for_good_error_of_one_attempt_is_left_alone() -> None:
    for error in (ValueError("a reward"), ConnectionError("closed by peer"), died()):
        raise_if_fatal(error)
