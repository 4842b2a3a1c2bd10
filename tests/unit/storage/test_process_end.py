"""The end of a process while threads call storage."""

import subprocess
import sys
import threading

import pytest

from grpo_ray.storage.process_end import ProcessEnd

ENDS_WHILE_A_THREAD_RETRIES = """
import builtins, os, threading, time

os.environ |= {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s"}
from grpo_ray.storage import process_end, retry
from grpo_ray.storage.run_folder import RunFolder


class SlowToGo:
    def __del__(self, time=time):
        time.sleep(2)  # longer than the pause between two attempts


retry.FIRST_PAUSE = retry.LONGEST_PAUSE = 1.0
builtins.last_of_all = SlowToGo()
folder = RunFolder("s3://bucket/runs?endpoint_override=127.0.0.1:9&scheme=http&region=r", "run", 600)
read = lambda: folder.filesystem.get_file_info(["bucket/runs/run/metrics.jsonl"])
threading.Thread(target=read, daemon=True).start()
time.sleep(0.5)
print("done", flush=True)
"""
"""Program whose thread wakes up, and wants the interpreter, while the interpreter is taken down."""


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], text=True, capture_output=True, timeout=300)


@pytest.mark.long
def test_process_ends_in_order_while_a_thread_retries_storage() -> None:
    ended = run(ENDS_WHILE_A_THREAD_RETRIES)
    assert (ended.returncode, ended.stdout) == (0, "done\n"), ended.stderr


@pytest.mark.long
@pytest.mark.skipif(sys.version_info >= (3, 14), reason="such a thread hangs, and the process ends without it")
def test_process_without_the_gate_dies() -> None:
    without = "process_end.ProcessEnd.close = lambda self: None\nretry.FIRST_PAUSE ="
    ended = run(ENDS_WHILE_A_THREAD_RETRIES.replace("retry.FIRST_PAUSE =", without))
    assert ended.returncode != 0 and "PyGILState_Release" in ended.stderr


def test_close_waits_for_calls_under_way_and_stops_others() -> None:
    gate, inside, may_end = ProcessEnd(), threading.Event(), threading.Event()
    passed = []

    def call(name: str, wait: threading.Event) -> None:
        with gate.call():
            inside.set()
            wait.wait()
        passed.append(name)

    threading.Thread(target=call, args=("under way", may_end), daemon=True).start()
    inside.wait()
    gate.close(seconds=0.01)  # not ended yet
    closing = threading.Thread(target=gate.close, args=(300,), daemon=True)
    closing.start()
    may_end.set()
    closing.join(300)
    assert not closing.is_alive()
    done = threading.Event()
    done.set()
    late = threading.Thread(target=call, args=("late", done), daemon=True)
    late.start()
    late.join(0.2)
    assert late.is_alive() and passed == []  # both stay where they are


def test_call_and_pause_of_the_closing_thread_go_on() -> None:
    gate = ProcessEnd()
    gate.close()
    with gate.call():
        gate.pause(0.0)
