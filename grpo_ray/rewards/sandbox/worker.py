"""Verifier worker: the limits that it sets for itself, its grading loop, and the warm-up before the fork."""

import logging
import os
import resource
import signal
import socket
import time

from grpo_ray.processes.confinement import Confinement
from grpo_ray.processes.limits import die_with_parent, set_soft_limit
from grpo_ray.rewards.sandbox.protocol import ERROR, ITEM, MEMORY, OK, RESULT, UNDECIDED

WORKER_LIMITS = {resource.RLIMIT_NPROC: 0}
"""Hard limits of a confined worker. Its memory and CPU time have soft limits, set in `run_worker`."""
LATE_IMPORTS = (r"\boxed{\frac{1}{2}}", r"$\int_0^1 x dx$")
"""Right completion and solution for which SymPy imports modules that `warm_up` does not import."""


def run_worker(
    sock: socket.socket, time_limit: float, memory_limit: int, confinement: Confinement | None = None
) -> None:
    """Grade items from the socket and write a result for each, until the socket closes.

    Args:
        sock: Connection to the supervisor.
        time_limit: Seconds per item. RLIMIT_CPU is set 2 s higher, in case the supervisor does not end the worker.
        memory_limit: Bytes of address space (RLIMIT_AS).
        confinement: Confinement applied to this process until it ends; None for none.
    """
    die_with_parent()
    set_soft_limit(resource.RLIMIT_CORE, 0)
    set_soft_limit(resource.RLIMIT_AS, memory_limit)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from grpo_ray.rewards.math.verify import grade

    if confinement is not None:
        confinement.apply([], WORKER_LIMITS)
    stream = sock.makefile("rwb", buffering=1 << 16)
    while header := stream.read(ITEM.size):
        number, completion_size, solution_size, strict = ITEM.unpack(header)
        completion = stream.read(completion_size).decode("utf-8", "surrogatepass")
        solution = stream.read(solution_size).decode("utf-8", "surrogatepass")
        set_soft_limit(resource.RLIMIT_CPU, int(time.process_time() + time_limit) + 2)
        status, reward = OK, 0.0
        try:
            verdict = grade(completion, solution, strict=bool(strict))
            reward = float("nan") if verdict.reward is None else verdict.reward
            status = UNDECIDED if verdict.is_undecided else OK
        except MemoryError:
            status = MEMORY
        except Exception as error:  # untrusted text: a parser may raise anything; it is counted and its type logged
            status = ERROR
            os.write(
                2,
                f"verifier: {type(error).__name__} on an item of {completion_size} bytes\n".encode(),
            )
        del completion, solution
        stream.write(RESULT.pack(number, status, reward))
        stream.flush()


def warm_up() -> None:
    """Grade one answer of each common structure, so that every fork inherits the parser's built tables."""
    from grpo_ray.rewards.math.values import parse_formula
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
    parse_formula.cache_clear()
