"""Verifier processes of a trainer that is killed."""

import subprocess
import sys

from judged_answers import HANGING
from process_watch import children, is_running, wait_until


def test_pool_killed_owner_leaves_no_verifier_process() -> None:
    script = f"""
from grpo_ray.rewards.pool import VerifierPool
pool = VerifierPool(processes=2, limit_seconds=600)
pool.score([("\\\\boxed{{1}}", "$1$")])
hanging = pool.submit(*{HANGING!r})
print(pool.pid, flush=True)
hanging.result()
"""
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        helper = int(owner.stdout.readline())
        wait_until(lambda: len(children(helper)) >= 1)
        workers = children(helper)
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    wait_until(lambda: not any(is_running(pid) for pid in (helper, *workers)))
