"""Tools and environments that go wrong in every way that the sandbox must survive, and some harmless ones."""

import asyncio
import contextlib
import ctypes
import os
import shutil
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

from grpo_ray.tools.sandbox import protocol

FOREVER = 1e6
"""Seconds."""
DOUBLINGS = 9
"""Generations of the fork bomb, which ends at 512 processes, so that a failed test cannot take the machine with it."""
SEEN: list[int] = []
"""State of this module, which no completion may see of another one."""


def add(a: int, b: int) -> int:
    """Add.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


async def add_later(a: int, b: int) -> int:
    """Add, asynchronously.

    Args:
        a: The first number.
        b: The second number.
    """
    await asyncio.sleep(0)
    return a + b


def nothing() -> None:
    """Return nothing."""


def fail() -> str:
    """Raise an exception."""
    raise ValueError("no such number")


def nap(seconds: float) -> str:
    """Sleep.

    Args:
        seconds: How long.
    """
    time.sleep(seconds)
    return "rested"


def hang() -> str:
    """Sleep forever, with every signal that can be ignored ignored."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    time.sleep(FOREVER)
    return ""


def spin() -> str:
    """Compute forever in one operation, without releasing the interpreter."""
    return str(9**9**9)


def megabyte() -> str:
    """Return a text of a megabyte."""
    return "x" * 10**6


def endless() -> str:
    """Return an object whose text is endless."""

    class Endless:
        def __str__(self) -> str:
            while True:
                time.sleep(0.1)

    return Endless()  # type: ignore[return-value]


def bomb() -> str:
    """Fork in every process, again and again."""
    for _ in range(DOUBLINGS):
        os.fork()
    time.sleep(FOREVER)
    return ""


def scattered_bomb() -> str:
    """Fork, each process in a session of its own."""
    for _ in range(DOUBLINGS):
        if os.fork() == 0:
            os.setsid()
    time.sleep(FOREVER)
    return ""


def segfault() -> str:
    """Read address 0."""
    ctypes.string_at(0)
    return ""


def leave() -> str:
    """End the process without a word."""
    os._exit(3)


def exit_politely() -> str:
    """Raise SystemExit."""
    raise SystemExit(3)


def remove_folder() -> str:
    """Remove the working folder."""
    shutil.rmtree(Path.cwd())
    return "removed"


def working_folder() -> str:
    """Return the working folder."""
    return os.getcwd()


def eat_memory() -> str:
    """Use 8 GiB of memory."""
    return str(len(bytearray(8 << 30)))


def fill_disk() -> str:
    """Write a file of 4 GiB."""
    with open("big", "wb") as file:
        file.truncate(4 << 30)
    return "written"


def daemonize() -> str:
    """Leave a process behind that has left its session."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(FOREVER)
        os._exit(0)
    return "started"


def remember(number: int) -> str:
    """Remember a number, and return all that are remembered.

    Args:
        number: The number.
    """
    SEEN.append(number)
    return str(SEEN)


def dice() -> str:
    """Throw a die 8 times."""
    import random

    return " ".join(str(random.randint(1, 6)) for _ in range(8))


def process_id() -> int:
    """Return the id of the process, as it sees it."""
    return os.getpid()


def is_dumpable() -> int:
    """Return 0 if other processes of the user cannot read the memory of this one."""
    return int(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))  # PR_GET_DUMPABLE


def variables() -> str:
    """Return the names of all environment variables."""
    return " ".join(sorted(os.environ))


def descriptors() -> str:
    """Return what the open descriptors refer to."""
    return " ".join(os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if _is_open(each))


def _is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def shout() -> str:
    """Write to stdout, to stderr, and to every descriptor that could be the supervisor's socket."""
    print("hello from a tool")
    for descriptor in range(1, 64):
        try:
            os.write(descriptor, b"\x05\x00\x00\x00junk!")
        except OSError:
            continue
    return "shouted"


def forge(id: int) -> str:
    """Write an answer to another request to every descriptor that could be the supervisor's socket.

    Args:
        id: Of that request.
    """
    for descriptor in range(3, 64):
        with contextlib.suppress(OSError):
            os.write(descriptor, protocol.pack({"status": "ok", "text": "forged", "id": id}))
    return "own"


class Counter:
    """Environment that counts."""

    done = False

    def __init__(self, start: int = 0):
        self._count = start

    def reset(self, *, seed: int, **columns: Any) -> str:
        """Return seed and columns."""
        return f"seed {seed}, {sorted(columns.items())}"

    def increase(self, by: int) -> int:
        """Count on.

        Args:
            by: How many.
        """
        self._count += by
        self.done = self._count >= 10
        return self._count

    def crash(self) -> str:
        """End the process."""
        os._exit(3)

    def step(self, message: str) -> str | None:
        """Answer a turn."""
        return f"you said {message}" if message else None

    def get_reward(self) -> float:
        """Return the count."""
        if self._count < 0:
            raise ValueError("a count below zero")
        return float(self._count)


class Narrow:
    """Environment in the style of TRL, whose reset takes one column and no seed."""

    def reset(self, level: str) -> None:
        """Keep the level."""
        self._level = level

    def show(self) -> str:
        """Return the level."""
        return self._level


def leave_processes(count: int) -> str:
    """Start processes from a thread, and leave them behind.

    Args:
        count: How many.
    """
    started = threading.Event()

    def start() -> None:
        for _ in range(count):
            subprocess.Popen(["sleep", str(FOREVER)])
        started.set()
        time.sleep(FOREVER)  # the processes belong to this thread

    threading.Thread(target=start, daemon=True).start()
    started.wait()
    return "left"


def return_twice() -> str:
    """Fork, and return from both processes, from the child later."""
    if os.fork() == 0:
        time.sleep(0.3)
        return "child"
    return "parent"


def exit_status() -> int:
    """Return the exit status of a command that fails."""
    return subprocess.run(["false"], check=False).returncode


def orphans(count: int) -> str:
    """Leave processes behind that end at once, for which nothing waits.

    Args:
        count: How many.
    """
    for _ in range(count):
        subprocess.run(["sh", "-c", "true & exit 0"], check=True)
    return "ended"


def headless(count: int) -> str:
    """Leave a process behind whose main thread has ended, with processes below it.

    Args:
        count: How many.
    """
    if os.fork() == 0:
        threading.Thread(target=_start_and_stay, args=(count,)).start()
        ctypes.CDLL(None).pthread_exit(None)
    time.sleep(1)
    return "left"


def _start_and_stay(count: int) -> None:
    for _ in range(count):
        subprocess.Popen(["sleep", str(FOREVER)])
    time.sleep(FOREVER)
