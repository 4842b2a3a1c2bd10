"""Tests of hang timeouts, and of the classification of worker errors."""

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
    RefusedRewardError,
    RepeatedWorkerError,
    RewardError,
    SupersededError,
    TrainingError,
)
from grpo_ray.resilience.error_triage import (
    FATAL_ERRORS,
    GPU_MEMORY_ADVICE,
    MEMORY_ADVICE,
    RepeatedErrorDetector,
    annotate_step,
    describe_worker_error,
    error_context,
    error_signature,
    error_step,
    raise_if_fatal,
    root_cause,
)


def broken_reward(value: int) -> None:
    raise ValueError(f"cannot score {value} at {object()!r}")


def other_reward(value: int) -> None:
    raise ValueError(f"cannot score {value} at {object()!r}")


def raised_in_worker(function: Callable[..., None], *args: Any, step: int) -> Exception:
    """Return the error as the controller receives it: raised and annotated in a worker, then pickled."""
    try:
        function(*args)
    except Exception as error:  # of any kind, as a worker's
        annotate_step(error, step)
        sent = cloudpickle.loads(cloudpickle.dumps(error))
    assert sent.__traceback__ is None
    return sent


def wrapped(error: Exception) -> Exception:
    """Return the error in Ray Train's wrapper, pickled."""
    from ray.train.v2._internal.util import construct_user_exception_with_traceback

    try:
        raise error
    except Exception as raised:  # raised above, to have a traceback
        return cloudpickle.loads(cloudpickle.dumps(construct_user_exception_with_traceback(raised)))


def worker_death() -> Exception:
    """Return Ray Train's error of a worker that was killed."""
    from ray.exceptions import ActorDiedError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    return WorkerHealthCheckFailedError("A worker health check failed.", failure=ActorDiedError())


def test_annotated_error_pickled_keeps_step_and_traceback() -> None:
    error = raised_in_worker(broken_reward, 5, step=12)
    assert error_step(error) == 12
    assert "grpo_ray step 12" in error.__notes__
    first, *frames = (error_signature(error) or "").splitlines()
    assert first == "builtins.ValueError: cannot score # at <object object at #>"
    assert frames[-1].endswith(":broken_reward") and __file__ in frames[-1]


def test_annotated_error_in_ray_wrapper_keeps_signature() -> None:
    error = raised_in_worker(broken_reward, 5, step=12)
    assert error_step(wrapped(error)) == 12
    assert error_signature(wrapped(error)) == error_signature(error)


def test_detector_repeated_error_raises_with_traceback() -> None:
    detector = RepeatedErrorDetector()
    detector.check({0: raised_in_worker(broken_reward, 1, step=12)})
    with pytest.raises(RepeatedWorkerError, match="step 12") as ended:
        detector.check({1: raised_in_worker(broken_reward, 2, step=12)})
    assert isinstance(ended.value, TrainingError)
    assert "in broken_reward" in str(ended.value) and "ValueError: cannot score 2" in str(ended.value)
    assert str(cloudpickle.loads(cloudpickle.dumps(ended.value))) == str(ended.value)


def test_detector_attempts_need_not_be_adjacent() -> None:
    detector = RepeatedErrorDetector()
    detector.check({0: raised_in_worker(broken_reward, 1, step=12)})
    detector.check({0: raised_in_worker(other_reward, 1, step=12)})
    detector.check({0: worker_death()})
    with pytest.raises(RepeatedWorkerError, match="step 12"):
        detector.check({0: raised_in_worker(broken_reward, 1, step=12)})


def test_detector_other_step_place_or_type_is_new() -> None:
    detector = RepeatedErrorDetector()
    for function in (broken_reward, other_reward):
        for step in (1, 2):
            detector.check({0: raised_in_worker(function, 1, step=step)})

    def raises(kind: type[Exception]) -> None:
        raise kind("no")

    for kind in (KeyError, NonFiniteError):
        detector.check({0: raised_in_worker(raises, kind, step=1)})


def test_detector_one_attempt_reported_twice_counts_once() -> None:
    detector = RepeatedErrorDetector()
    first, second = (raised_in_worker(broken_reward, rank, step=3) for rank in range(2))
    detector.check({0: first})
    detector.check({0: cloudpickle.loads(cloudpickle.dumps(first)), 1: second})
    with pytest.raises(RepeatedWorkerError):
        detector.check({1: raised_in_worker(broken_reward, 1, step=3)})


def test_detector_attempt_with_dead_worker_is_ignored() -> None:
    assert error_signature(worker_death()) is None and error_step(worker_death()) is None
    detector = RepeatedErrorDetector()
    for _ in range(3):
        detector.check({0: raised_in_worker(broken_reward, 1, step=4), 1: worker_death()})
    detector.check({0: raised_in_worker(broken_reward, 1, step=4)})  # the first attempt that counts


def test_detector_error_without_step_is_ignored() -> None:
    detector = RepeatedErrorDetector()
    for _ in range(3):
        detector.check({0: ValueError("raised in a thread of Ray")})


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
def test_detector_lost_peer_error_is_ignored(kind: type[Exception], message: str) -> None:
    detector = RepeatedErrorDetector()
    for _ in range(3):  # at the same step, before Ray reports the killed worker
        detector.check({0: raised_in_worker(all_reduce, kind, message, step=9)})
    detector.check(
        {0: raised_in_worker(all_reduce, kind, message, step=9), 1: raised_in_worker(broken_reward, 1, step=9)}
    )
    with pytest.raises(RepeatedWorkerError, match="cannot score"):
        detector.check(
            {0: raised_in_worker(all_reduce, kind, message, step=9), 1: raised_in_worker(broken_reward, 1, step=9)}
        )


def test_signature_task_error_has_one_actor_death_has_none() -> None:
    from ray.exceptions import ActorDiedError, RayTaskError

    def task_failed(cause: Exception) -> None:
        raise RayTaskError("f", 'File "task.py", line 3, in f', cause, "title", 1, "127.0.0.1").as_instanceof_cause()

    error = raised_in_worker(task_failed, ValueError("bad row 7"), step=2)
    assert error_step(error) == 2
    assert (error_signature(error) or "").startswith("builtins.ValueError: bad row #")
    assert error_signature(raised_in_worker(task_failed, ActorDiedError(), step=2)) is None


def test_error_context_annotates_and_reraises() -> None:
    with pytest.raises(KeyError) as caught, error_context(lambda: 7):
        raise KeyError("a bug")
    assert error_step(caught.value) == 7


def test_error_context_ignores_system_exit() -> None:
    with pytest.raises(SystemExit) as caught, error_context(lambda: 7):
        raise SystemExit(1)
    assert error_step(caught.value) is None


def test_describe_worker_error_memory_kill_gives_advice() -> None:
    from ray.exceptions import OutOfMemoryError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    killed = OutOfMemoryError("1 worker(s) were killed due to the node running low on memory. See ...")
    for error in (killed, WorkerHealthCheckFailedError("A worker health check failed.", failure=killed)):
        assert describe_worker_error(error) == MEMORY_ADVICE
    assert describe_worker_error(worker_death()).startswith("it died")


def test_describe_worker_error_full_gpu_gives_advice() -> None:
    # As torch writes it.
    full = RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of ...\nSee ...")
    described = describe_worker_error(full)
    assert described.endswith("; " + GPU_MEMORY_ADVICE) and "Tried to allocate 2.00 GiB" in described
    assert GPU_MEMORY_ADVICE not in describe_worker_error(RuntimeError("bad reward"))


def test_root_cause_prefers_code_to_death_to_lost_peer() -> None:
    cause = ValueError("bad reward")
    assert root_cause({0: ConnectionError("closed by peer"), 1: worker_death(), 2: cause}) == (2, cause)
    death = worker_death()
    assert root_cause({0: ConnectionError("closed by peer"), 1: death}) == (1, death)


@pytest.mark.parametrize(
    "kind", [NonFiniteError, CheckpointError, ConfigError, DataError, LedgerError, RefusedRewardError, SupersededError]
)
def test_raise_if_fatal_fatal_error_is_raised(kind: type[Exception]) -> None:
    error = kind("the next attempt would fail too")
    with pytest.raises(kind) as raised:
        raise_if_fatal(wrapped(error))
    assert type(raised.value) is kind and kind in FATAL_ERRORS


def test_raise_if_fatal_other_error_is_ignored() -> None:
    for error in (
        ValueError("a reward"),
        RewardError("no process can be started"),
        ConnectionError("closed by peer"),
        worker_death(),
    ):
        raise_if_fatal(error)
