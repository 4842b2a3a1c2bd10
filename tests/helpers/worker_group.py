"""Runs a function on several workers of one process group, each a process of its own."""

import multiprocessing
import os
import runpy
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest

PRELOADED = ["grpo_ray.learner.learner", "grpo_ray.resilience.nonfinite", "datasets"]
"""Modules that take tens of seconds to import. They are imported once for all worker processes of a test session."""


def start_processes(function: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Start one process for each tuple of arguments. The function must be importable, so it lives in a helper module.

    The processes are forked from a server process that has imported PRELOADED and done nothing else, so no thread and
    no device state is inherited.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        # Ray reads it while it is imported, and the server may be started before any cluster, which then sets it.
        patch.setenv("RAY_AUTH_MODE", "token")
        forkserver.ensure_running()
    processes = [context.Process(target=function, args=each, daemon=True) for each in arguments]
    for process in processes:
        process.start()
    return processes


def run_script(
    script: Path, arguments: Sequence[str], output: Path, environment: Mapping[str, str], limit: float = 600
) -> int:
    """Run a Python script in a process that has imported the libraries; return its exit status.

    The output of the script and of its children is written to a file. A script that is not done after `limit` seconds
    is killed, and its status is -9.
    """
    [process] = start_processes(_run_script, [(script, list(arguments), output, dict(environment))])
    process.join(limit)
    process.kill()
    process.join()
    return int(process.exitcode)


def _run_script(script: Path, arguments: list[str], output: Path, environment: dict[str, str]) -> None:
    import torch

    with output.open("w") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.clear()
    os.environ.update(environment)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))  # as Python does for a script
    sys.path[1:1] = [each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each]
    runpy.run_path(str(script), run_name="__main__")


def run_workers(
    function: Callable[..., Any],
    workers: int,
    *arguments: Any,
    kwargs: Mapping[str, Any] | None = None,
    limit: float = 300,
) -> list[Any]:
    """Call `function(rank, *arguments, **kwargs)` on each worker and return the results by rank.

    The function has to create the process group itself, from the environment variables that torchrun would set. Its
    store is here, as torchrun's is in its agent: a port that a worker opens later might be taken by then.
    Raises AssertionError with the first worker's traceback, or where a worker is not done after `limit` seconds.
    """
    from torch.distributed import TCPStore

    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(workers)]
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = start_processes(
        _work,
        [
            (send, partial(function, **(kwargs or {})), rank, workers, store.port, arguments)
            for rank, (_, send) in enumerate(pipes)
        ],
    )
    results: dict[int, Any] = {}
    try:
        for _, send in pipes:
            send.close()  # so that the end of the process ends the pipe
        pending = {receive: rank for rank, (receive, _) in enumerate(pipes)}
        while pending:
            ready: list[Any] = wait(pending, limit)
            assert ready, f"worker {sorted(pending.values())} is not done after {limit} seconds"
            for receive in ready:
                rank = pending.pop(receive)
                try:
                    ended, result = receive.recv()
                except EOFError:
                    raise AssertionError(f"worker {rank} ended without a result") from None
                assert ended == "returned", f"worker {rank}:\n{result}"
                results[rank] = result
    finally:
        for process in processes:
            process.join(20 if len(results) == workers else 0)
            process.kill()
            process.join()
    return [results[rank] for rank in range(workers)]


def _work(
    send: Connection, function: Callable[..., Any], rank: int, workers: int, port: int, arguments: tuple[Any, ...]
) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(workers),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        # With more threads, which accelerate would start, workers on a busy machine wait for each other.
        "OMP_NUM_THREADS": "1",
    }
    import torch

    torch.set_num_threads(1)
    try:
        send.send(("returned", function(rank, *arguments)))
    except BaseException:  # the parent process raises it
        send.send(("raised", traceback.format_exc()))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
