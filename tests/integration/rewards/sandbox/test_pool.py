"""Tests of the verifier pool: no process survives a killed trainer."""

import signal
import subprocess
import sys

from judged_answers import HANGING
from process_watch import children, is_running, wait_until

from grpo_ray.rewards.sandbox.pool import VerifierPool


def test_pool_killed_owner_leaves_no_verifier_process() -> None:
    script = f"""
from grpo_ray.rewards.sandbox.pool import VerifierPool
pool = VerifierPool(processes=2, time_limit=600)
pool.grade([("\\\\boxed{{1}}", "$1$")])
hanging = pool.submit(*{HANGING!r})
print(pool.pid, flush=True)
hanging.result()
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    try:
        supervisor = int(owner.stdout.readline())
        wait_until(lambda: len(children(supervisor)) >= 1)
        workers = children(supervisor)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    wait_until(lambda: not any(is_running(pid) for pid in (supervisor, *workers)))


def test_pool_of_trainer_that_ignores_ended_children_grades_on_after_a_timeout() -> None:
    handler = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with VerifierPool(processes=1, time_limit=2) as pool:
            assert pool.submit(*HANGING).result().status == "timeout"
            supervisor = pool.pid
            assert pool.submit("\\boxed{1}", "$1$").result().status == "ok"
            assert pool.pid == supervisor
    finally:
        signal.signal(signal.SIGCHLD, handler)
