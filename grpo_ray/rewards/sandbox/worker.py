"""Inside a verifier worker: its limits on itself, its loop, and what its parent warms up for it."""

import ctypes
import logging
import os
import resource
import signal
import socket
import sys
import time

from grpo_ray.rewards.sandbox.protocol import ERROR, ITEM, MEMORY, OK, RESULT

_PR_SET_PDEATHSIG = 1


def run_worker(sock: socket.socket, limit: float, memory: int) -> None:
    """A worker's life: read an item, judge it, write the verdict, until the socket closes."""
    _die_with_parent()
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_AS, memory)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from grpo_ray.rewards.math.verify import correctness

    stream = sock.makefile("rwb", buffering=1 << 16)
    while header := stream.read(ITEM.size):
        number, completion_size, solution_size, strict = ITEM.unpack(header)
        completion = stream.read(completion_size).decode("utf-8", "surrogatepass")
        solution = stream.read(solution_size).decode("utf-8", "surrogatepass")
        _limit(resource.RLIMIT_CPU, int(time.process_time() + limit) + 2)
        status, reward = OK, 0.0
        try:
            verdict = correctness(completion, solution, strict=bool(strict))
            reward = float("nan") if verdict is None else verdict
        except MemoryError:
            status = MEMORY
        except Exception as error:  # the untrusted edge: a parser may raise anything; it is counted and its type told
            status = ERROR
            os.write(
                2,
                f"verifier: {type(error).__name__} on an item of {completion_size} bytes\n".encode(),
            )
        del completion, solution
        stream.write(RESULT.pack(number, status, reward))
        stream.flush()


def _limit(kind: int, amount: int) -> None:
    """Sets a soft limit, within the hard one that this process already has."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (amount if hard == resource.RLIM_INFINITY else min(amount, hard), hard))


def _die_with_parent() -> None:
    """Asks Linux to kill this process with its parent. Elsewhere RLIMIT_CPU and the closed socket must do."""
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def preload() -> None:
    """Runs the parser once on each common shape, so that every fork has its tables built."""
    from grpo_ray.rewards.math.values import parse
    from grpo_ray.rewards.math.verify import correctness, parse_solution

    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for solution, answer in (
        (r"$\frac{1}{2}$", "0.25"),
        (r"$x^2+2x-\sqrt{3}$", r"x^{2}-\sqrt[3]{3}\cdot y_1"),
        (r"$\pi r^2$", r"\frac{\pi}{2}r^2"),
        (r"$(1,2]$", r"1 < x \le 3"),
        (r"$\{e^{2},\ln 2\}$", r"e^{3}, \log_2 3, \sin(\frac{\pi}{3})"),
        (r"$\begin{pmatrix}1&2\\3&4\end{pmatrix}$", r"\begin{pmatrix}1&2\\3&5\end{pmatrix}"),
        (r"$n!+\binom{n}{2}$", r"(n+1)!-|n|"),
    ):
        correctness(rf"\boxed{{{answer}}}", solution)
    correctness(r"\boxed{1}", "$2$", strict=False)
    parse_solution.cache_clear()
    parse.cache_clear()
