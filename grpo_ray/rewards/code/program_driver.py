"""Script that runs a program on inputs and calls, each in a process of its own, inside the confined interpreter.

`grading.py` sends the sources of `values.py` and of this module, and a call of `main`, to the Python tool. The program
can change everything in this interpreter. That does not help it to pass a test, because the expected results are not
here: a forged result is graded like any other.
"""

import atexit
import base64
import builtins
import contextlib
import hashlib
import json
import math
import os
import resource
import select
import signal
import sys
import threading
import time
import typing
import zlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

from grpo_ray.rewards.code.values import decode, encode

MARK = "\x1e"
"""Character before each line of a result; the text before it is output of the program."""
CUT = "cut"
"""Status of calls that were not made because the earlier ones reached `CALLS_CHARS` or `BATCH_CPU_SECONDS`."""
CALLS_CHARS, VALUE_CHARS = 40_000, 15_000
"""Characters of all results after which no further call is made; and most characters of one result. A longer result is
compressed, and given up if it is still too long."""
BATCH_CPU_SECONDS = 20.0
"""CPU seconds after which no further call is made in this interpreter."""
PIPE_BYTES = 1 << 20
OUTPUT_BYTES = 8 << 20
"""Largest output of a program; a larger one fails the test."""
WALL_FACTOR, WALL_SECONDS = 10.0, 10.0
"""Limit of a process's wall time: its limit of CPU time multiplied by the factor, plus the constant. It ends processes
that wait for ever."""


def main(request: str) -> None:
    """Run the request and print one line for each of its inputs, or of its calls.

    Args:
        request: JSON with `program`, `cpu_seconds`, `max_timeouts`, and `inputs` or `calls`. A call has `path` (a
            function's name, or the name of a class, its arguments, and the name of a method), `args` and `kwargs`.
    """
    asked = json.loads(request)
    report = os.fdopen(os.dup(1), "w", encoding="utf-8")
    timeouts = 0
    for number, text in enumerate(asked.get("inputs", ())):
        if timeouts >= asked["max_timeouts"]:
            report.write(f'{MARK}{{"rest": "timeout"}}\n')
            break
        result = run_on_input(asked, text)
        timeouts += result.get("status") in ("timeout", "stuck")
        write(report, number, result)
        if result.get("status") == "stuck":
            report.write(f'{MARK}{{"rest": "timeout"}}\n')
            break
    if asked.get("calls"):
        # The program's module is loaded once; each call is made in a fork of the process that has loaded it.
        limit = asked["cpu_seconds"] * (len(asked["calls"]) + 1)
        lines, _, status = in_child(lambda pipe: serve_calls(asked, pipe), limit)
        for line in lines.decode("utf-8", "replace").splitlines():
            report.write(f"{MARK}{line}\n")
        if status:  # the calls after the last line have no result, for this reason
            report.write(f'{MARK}{{"rest": {json.dumps(status)}}}\n')
    report.flush()


def write(file: Any, number: int, result: dict[str, Any], mark: str = MARK) -> int:
    """Write a result as one line; return its length."""
    length = file.write(f"{mark}{json.dumps({'number': number, **result})}\n")
    file.flush()
    return int(length)


def run_on_input(asked: dict[str, Any], text: str) -> dict[str, Any]:
    """Run the whole program on a standard input; return a hash of what it prints."""
    with open("stdin", "w", encoding="utf-8") as file:
        file.write(text)

    def work(pipe: int) -> None:
        os.dup2(os.open("stdin", os.O_RDONLY), 0)
        os.dup2(os.open("stdout", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        sys.stdin, sys.stdout = os.fdopen(0, "r", encoding="utf-8"), os.fdopen(1, "w", encoding="utf-8")
        try:
            execute(asked["program"], "__main__")
        finally:  # as a Python interpreter does when a script ends
            end_program()

    _, cpu, status = in_child(work, asked["cpu_seconds"])
    if status:
        return {"status": status, "cpu": cpu}
    with open("stdout", "rb") as printed:
        output = printed.read(OUTPUT_BYTES + 1)
    if len(output) > OUTPUT_BYTES:
        return {"status": "output", "cpu": cpu}
    return {"hash": output_hash(output.decode("utf-8", "replace")), "cpu": cpu}


def end_program() -> None:
    """Wait for the threads of a program, call its exit functions, and write the rest of its output."""
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and not thread.daemon:
            thread.join()
    atexit._run_exitfuncs()
    sys.stdout.flush()


def output_hash(output: str) -> str:
    """Return a hash of an output without spaces at the ends of its lines, and without space at its start and end."""
    lines = "\n".join(line.rstrip() for line in output.strip().splitlines())
    return hashlib.sha256(lines.encode("utf-8", "surrogatepass")).hexdigest()


def serve_calls(asked: dict[str, Any], pipe: int) -> None:
    """Load the program as a module, and make each call in a fork; write a line for each to the pipe."""
    for descriptor in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), descriptor)
    report = os.fdopen(pipe, "w", encoding="utf-8", closefd=False)
    try:
        namespace = load(asked)
    except BaseException as error:  # a program may raise anything
        for number in range(len(asked["calls"])):
            write(report, number, {"error": type(error).__name__}, "")
        return
    chars, timeouts, spent = 0, 0, 0.0
    for number, call in enumerate(asked["calls"]):
        is_cut = chars > CALLS_CHARS or spent > BATCH_CPU_SECONDS
        if is_cut or timeouts >= asked["max_timeouts"]:
            report.write(json.dumps({"rest": CUT if is_cut else "timeout"}) + "\n")
            report.flush()
            return
        lines, cpu, status = in_child(partial(answer, namespace, call), asked["cpu_seconds"])
        spent += cpu
        if status == "stuck":
            timeouts, status = asked["max_timeouts"], "timeout"
        result: dict[str, Any] = {"status": status}
        if not status:
            try:
                result = json.loads(lines)
            except ValueError:
                result = {"status": "crash"}
        if len(json.dumps(result)) > VALUE_CHARS:
            packed = base64.b85encode(zlib.compress(json.dumps(result).encode())).decode()
            result = {"packed": packed} if len(packed) <= VALUE_CHARS else {"status": "output"}
        timeouts += status == "timeout"
        chars += write(report, number, {**result, "cpu": cpu}, "")


def load(asked: dict[str, Any]) -> dict[str, Any]:
    """Run the program as a module, and return its namespace; end this process at the limits of one test."""
    own = {signal.ITIMER_PROF: asked["cpu_seconds"], signal.ITIMER_REAL: wall_limit(asked["cpu_seconds"])}
    before = {timer: signal.setitimer(timer, seconds)[0] for timer, seconds in own.items()}
    try:
        return execute(asked["program"], "solution")
    finally:  # each call has timers of its own
        for timer, seconds in before.items():
            signal.setitimer(timer, seconds)


def answer(namespace: dict[str, Any], call: dict[str, Any], pipe: int) -> None:
    """Make one call, and write its result, or the name of its exception, to the pipe."""
    try:
        function = find(namespace, call["path"])
        args, kwargs = decode(call["args"]), decode(call["kwargs"])
        value = function(*args, **kwargs)
        result = {"value": encode(value)}
        if (left := encode(args)) != call["args"]:  # the function has changed its arguments
            result["args"] = left
    except BaseException as error:  # a program may raise anything
        result = {"error": type(error).__name__}
    data = json.dumps(result).encode()
    while data:
        data = data[os.write(pipe, data) :]


def find(namespace: dict[str, Any], path: list[Any]) -> Any:
    """Return the function that a path names; a function that does not exist may be a method of `Solution`."""
    if len(path) == 3:
        args, kwargs = decode(path[1]["args"]), decode(path[1]["kwargs"])
        return getattr(namespace[path[0]](*args, **kwargs), path[2])
    if path[0] not in namespace and "Solution" in namespace:
        return getattr(namespace["Solution"](), path[0])
    return namespace[path[0]]


def execute(program: str, name: str) -> dict[str, Any]:
    """Run a program as a module of this name, and return its namespace."""
    module = ModuleType(name)
    sys.modules[name] = module
    # The starters of LeetCode's problems use names of `typing` without an import.
    module.__dict__.update({each: getattr(typing, each) for each in typing.__all__})
    module.__dict__["__builtins__"] = builtins
    exec(compile(program, "<program>", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def wall_limit(cpu_seconds: float) -> float:
    """Return the limit of a process's wall time in seconds."""
    return WALL_FACTOR * cpu_seconds + WALL_SECONDS


def in_child(work: Callable[[int], None], cpu_seconds: float) -> tuple[bytes, float, str]:
    """Run `work` in a fork with a limit of CPU time.

    Returns:
        The bytes written to the pipe; the CPU seconds of the fork; and "", or the reason of its failure: timeout,
        crash, exit, or stuck (it cannot be ended before the interpreter ends, because confined processes cannot send
        signals on some systems).
    """
    readable, writable = os.pipe()
    wall_seconds = wall_limit(cpu_seconds)
    if (pid := os.fork()) == 0:
        code = 1
        try:
            os.close(readable)
            whole = math.ceil(cpu_seconds) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (whole, whole))
            for number, timer, seconds in (
                (signal.SIGPROF, signal.ITIMER_PROF, cpu_seconds),
                (signal.SIGALRM, signal.ITIMER_REAL, wall_seconds),
            ):
                signal.signal(number, signal.SIG_DFL)  # ends the process
                signal.setitimer(timer, seconds)
            work(writable)
            code = 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # a program may raise anything, and the fork must not run on as its parent
            code = 1
        finally:
            os._exit(code & 255)
    os.close(writable)
    data, end_of_time = bytearray(), time.monotonic() + wall_seconds + 1
    while len(data) < PIPE_BYTES and (left := end_of_time - time.monotonic()) > 0:
        if not select.select([readable], [], [], left)[0] or not (part := os.read(readable, 1 << 16)):
            break
        data += part
    os.close(readable)
    status, usage = wait(pid, end_of_time)
    if status is None:
        return bytes(data), cpu_seconds, "stuck"
    cpu, code = usage.ru_utime + usage.ru_stime, os.waitstatus_to_exitcode(status)
    if (
        time.monotonic() >= end_of_time
        or cpu >= cpu_seconds
        or code in (-signal.SIGPROF, -signal.SIGXCPU, -signal.SIGALRM)
    ):
        return bytes(data), cpu, "timeout"
    return bytes(data), cpu, "" if code == 0 else "crash" if code < 0 else "exit"


def wait(pid: int, end_of_time: float) -> tuple[int | None, Any]:
    """Wait for a child, and kill it at `end_of_time`; return its wait status and resource usage.

    Args:
        end_of_time: monotonic seconds.

    Returns:
        Wait status, None if the child cannot be killed; and resource usage, as from `os.wait4`.
    """
    killed = False
    while True:
        ended, status, usage = os.wait4(pid, os.WNOHANG)
        if ended:
            return status, usage
        late = time.monotonic() - end_of_time
        if late > 0 and not killed:
            killed = True
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        elif late > 2:
            return None, usage
        time.sleep(0.001)
