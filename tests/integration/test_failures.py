"""Hangs, in processes of their own so that ending is real; and errors that come again, as Ray hands them over."""

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from grpo_ray.errors import BadNumbersError, SameBugError, TrainingError
from grpo_ray.failures import HANGING, Marking, Pace, SameBug, signature, step_of, with_step


def test_the_usual_time_is_the_median_of_a_kind() -> None:
    pace = Pace(factor=10, floor=5)
    assert pace.usual("step") is None and pace.limit("step") == 5
    for seconds in (60, 1, 2, 2):  # the first step compiles
        pace.add("step", seconds)
    assert pace.usual("step") == 2 and pace.limit("step") == 20
    pace.add("save", 0.1)
    assert pace.limit("save") == 5  # 10 x 0.1 s is below the floor
    assert pace.limit("step") == 20


def test_the_usual_time_follows_steps_that_grow_longer() -> None:
    pace = Pace(factor=2, floor=1)
    for seconds in [1] * 20 + [10] * 11:  # of the last 20, 11 took 10 s
        pace.add("step", seconds)
    assert pace.limit("step") == 20


def run(folder: Path, body: str, **settings: float) -> tuple[int, str, str]:
    """Run a worker with a watchdog in a process of its own: its exit code, what it printed, and its stacks."""
    settings = {"factor": 3, "floor": 0.5, "grace": 0.3} | settings
    code = (
        textwrap.dedent("""
            import ctypes, os, time
            from pathlib import Path
            from grpo_ray.failures import Watchdog

            def say(message, stacks):
                print("told:", message, "and", Path(stacks).read_text().count("File"), "frames", flush=True)

            STACKS = Path("stacks.txt")
        """)
        + f"SETTINGS = {settings!r}\n"
        + textwrap.dedent(body)
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    stacks = folder / "stacks.txt"
    return done.returncode, done.stdout + done.stderr, stacks.read_text() if stacks.exists() else ""


def test_a_hanging_step_ends_the_process_and_its_stacks_name_the_function(tmp_path: Path) -> None:
    code, said, stacks = run(
        tmp_path,
        """
        def waits_for_ever():
            time.sleep(1000)

        with Watchdog(STACKS, on_hang=say, **SETTINGS) as watchdog:
            watchdog.beat("step", 7)
            waits_for_ever()
        """,
    )
    assert code == HANGING
    assert "in waits_for_ever" in stacks and "step (step 7) hangs" in stacks
    assert "told: step (step 7) hangs" in said and "usually not known" in said and " 0 frames" not in said


def test_the_step_hangs_although_it_runs_in_another_thread(tmp_path: Path) -> None:
    code, _, stacks = run(
        tmp_path,
        """
        import threading

        def spins_for_ever():
            while True:
                pass

        with Watchdog(STACKS, on_hang=say, **SETTINGS) as watchdog:
            watchdog.beat("step")
            thread = threading.Thread(target=spins_for_ever)
            thread.start()
            thread.join()
        """,
    )
    assert code == HANGING and "in spins_for_ever" in stacks


def test_native_code_that_holds_the_interpreter_is_ended_too(tmp_path: Path) -> None:
    code, said, stacks = run(
        tmp_path,
        """
        def never_lets_go():
            ctypes.PyDLL(None).sleep(1000)

        with Watchdog(STACKS, on_hang=say, **SETTINGS) as watchdog:
            watchdog.beat("step")
            never_lets_go()
        """,
    )
    assert code == 1  # faulthandler's own
    assert "in never_lets_go" in stacks and "told" not in said


@pytest.mark.parametrize("fails", ["raise OSError('storage is gone')", "time.sleep(1000)"])
def test_a_process_ends_although_nobody_could_be_told(tmp_path: Path, fails: str) -> None:
    code, _, stacks = run(
        tmp_path,
        f"""
        def say(message, stacks):
            {fails}

        with Watchdog(STACKS, on_hang=say, **SETTINGS) as watchdog:
            watchdog.beat("step")
            time.sleep(1000)
        """,
    )
    assert code == (HANGING if "raise" in fails else 1) and "hangs" in stacks


def test_a_steady_loop_is_left_alone_and_leaves_no_file(tmp_path: Path) -> None:
    code, said, _ = run(
        tmp_path,
        """
        with Watchdog(STACKS, on_hang=say, **SETTINGS) as watchdog:
            for step in range(30):
                watchdog.beat("step", step)
                time.sleep(0.02)
                watchdog.beat("save", step)
            watchdog.suspend()
            time.sleep(6)  # longer than the limit of 4 s, and than the backstop's 4 + 2 x 0.3 + 1
            watchdog.beat("step")
        print("done", STACKS.exists())
        """,
        floor=4,
    )
    assert (code, said) == (0, "done False\n")


def test_a_slow_kind_has_a_limit_of_its_own(tmp_path: Path) -> None:
    code, said, stacks = run(
        tmp_path,
        """
        with Watchdog(STACKS, on_hang=say, **SETTINGS) as watchdog:
            watchdog.pace.add("save", 1000)
            for step in range(2):
                watchdog.beat("save")
                time.sleep(2.5)  # a step would hang by now
                watchdog.beat("step", step)
            time.sleep(1000)
        """,
        floor=2,
    )
    assert code == HANGING and stacks.count("hangs:") == 1 and "step (step 1) hangs" in said


def test_others_that_hang_in_the_same_step_are_given_time(tmp_path: Path) -> None:
    code, said, _ = run(
        tmp_path,
        """
        def end():
            print("waited", time.monotonic() - told[0] > 1, flush=True)  # 2 s, less what a busy machine takes to say so
            os._exit(5)

        told = []
        with Watchdog(STACKS, on_hang=lambda *said: told.append(time.monotonic()), end=end, **SETTINGS) as watchdog:
            watchdog.beat("step")
            time.sleep(1000)
        """,
        grace=2,
    )
    assert (code, said) == (5, "waited True\n")


def broken_reward(value: int) -> None:
    raise ValueError(f"cannot score {value} at {object()!r}")


def other_reward(value: int) -> None:
    raise ValueError(f"cannot score {value} at {object()!r}")


def attempt(function: Callable[..., None], *args: Any, step: int) -> Exception:
    """What the controller sees of an error: it was raised in a worker, marked there, and came by pickle."""
    try:
        function(*args)
    except Exception as error:
        with_step(error, step)
        sent = cloudpickle.loads(cloudpickle.dumps(error))
    assert sent.__traceback__ is None
    return sent


def wrapped(error: Exception) -> Exception:
    """Ray Train's own wrapper of what a train function raised, as it comes by pickle."""
    from ray.train.v2._internal.util import construct_user_exception_with_traceback

    try:
        raise error
    except Exception as raised:
        return cloudpickle.loads(cloudpickle.dumps(construct_user_exception_with_traceback(raised)))


def died() -> Exception:
    """What Ray Train says of a worker that was killed."""
    from ray.exceptions import ActorDiedError
    from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError

    return WorkerHealthCheckFailedError("A worker health check failed.", failure=ActorDiedError())


def test_an_error_carries_its_step_and_its_traceback_through_pickling() -> None:
    error = attempt(broken_reward, 5, step=12)
    assert step_of(error) == 12
    assert "grpo_ray step 12" in error.__notes__
    first, *frames = (signature(error) or "").splitlines()
    assert first == "builtins.ValueError: cannot score # at <object object at #>"
    assert frames[-1].endswith(":broken_reward") and __file__ in frames[-1]


def test_step_and_signature_are_found_inside_rays_wrapper() -> None:
    error = attempt(broken_reward, 5, step=12)
    assert step_of(wrapped(error)) == 12
    assert signature(wrapped(error)) == signature(error)


def test_the_same_error_at_the_same_step_ends_the_run_with_its_traceback() -> None:
    same_bug = SameBug()
    same_bug.after_exception({0: attempt(broken_reward, 1, step=12)})
    with pytest.raises(SameBugError, match="step 12") as ended:
        same_bug.after_exception({1: attempt(broken_reward, 2, step=12)})
    assert isinstance(ended.value, TrainingError)
    assert "in broken_reward" in str(ended.value) and "ValueError: cannot score 2" in str(ended.value)
    assert str(cloudpickle.loads(cloudpickle.dumps(ended.value))) == str(ended.value)


def test_the_two_attempts_need_not_be_adjacent() -> None:
    same_bug = SameBug()
    same_bug.after_exception({0: attempt(broken_reward, 1, step=12)})
    same_bug.after_exception({0: attempt(other_reward, 1, step=12)})
    same_bug.after_exception({0: died()})
    with pytest.raises(SameBugError, match="step 12"):
        same_bug.after_exception({0: attempt(broken_reward, 1, step=12)})


def test_another_step_another_place_or_another_type_is_another_error() -> None:
    same_bug = SameBug()
    for function in (broken_reward, other_reward):
        for step in (1, 2):
            same_bug.after_exception({0: attempt(function, 1, step=step)})

    def raises(kind: type[Exception]) -> None:
        raise kind("no")

    for kind in (KeyError, BadNumbersError):
        same_bug.after_exception({0: attempt(raises, kind, step=1)})


def test_one_attempt_shown_twice_is_one_attempt() -> None:
    same_bug = SameBug()
    first, second = (attempt(broken_reward, rank, step=3) for rank in range(2))
    same_bug.after_exception({0: first})
    same_bug.after_exception({0: cloudpickle.loads(cloudpickle.dumps(first)), 1: second})
    with pytest.raises(SameBugError):
        same_bug.after_exception({1: attempt(broken_reward, 1, step=3)})


def test_a_death_has_no_signature_and_makes_its_attempt_no_evidence() -> None:
    assert signature(died()) is None and step_of(died()) is None
    same_bug = SameBug()
    for _ in range(3):
        same_bug.after_exception({0: attempt(broken_reward, 1, step=4), 1: died()})
    same_bug.after_exception({0: attempt(broken_reward, 1, step=4)})  # the first that counts


def test_an_error_whose_mark_was_lost_on_the_way_is_no_evidence() -> None:
    same_bug = SameBug()
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
def test_an_error_that_says_a_worker_is_gone_is_a_consequence(kind: type[Exception], message: str) -> None:
    same_bug = SameBug()
    for _ in range(3):  # at the same step, before Ray has heard which worker was killed
        same_bug.after_exception({0: attempt(all_reduce, kind, message, step=9)})
    same_bug.after_exception({0: attempt(all_reduce, kind, message, step=9), 1: attempt(broken_reward, 1, step=9)})
    with pytest.raises(SameBugError, match="cannot score"):
        same_bug.after_exception({0: attempt(all_reduce, kind, message, step=9), 1: attempt(broken_reward, 1, step=9)})


def test_an_error_of_a_ray_task_is_the_users_and_the_death_of_its_actor_is_not() -> None:
    from ray.exceptions import ActorDiedError, RayTaskError

    def task_failed(cause: Exception) -> None:
        raise RayTaskError("f", 'File "task.py", line 3, in f', cause, "title", 1, "127.0.0.1").as_instanceof_cause()

    error = attempt(task_failed, ValueError("bad row 7"), step=2)
    assert step_of(error) == 2
    assert (signature(error) or "").startswith("builtins.ValueError: bad row #")
    assert signature(attempt(task_failed, ActorDiedError(), step=2)) is None


def test_an_error_that_leaves_a_marked_block_carries_its_step_and_goes_on_its_way() -> None:
    with pytest.raises(KeyError) as caught, Marking(lambda: 7):
        raise KeyError("a bug")
    assert step_of(caught.value) == 7


def test_a_marked_block_leaves_the_end_of_the_process_alone() -> None:
    with pytest.raises(SystemExit) as caught, Marking(lambda: 7):
        raise SystemExit(1)
    assert step_of(caught.value) is None
