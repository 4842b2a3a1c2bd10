"""Live page of a run folder, served in the test's process, and requests to it."""

import contextlib
import http.client
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from failing_storage import wait_for

from grpo_ray.pages.watch.live_run import LiveRun
from grpo_ray.pages.watch.refresher import Refresher
from grpo_ray.pages.watch.server import WatchServer
from grpo_ray.storage.run_folder import RunFolder


@contextlib.contextmanager
def serving(folder: RunFolder) -> Iterator[WatchServer]:
    """Serve the page of a run folder in this process."""
    with WatchServer(Refresher(LiveRun(folder))) as server:
        wait_for(lambda: state_of(server)["number"] is not None, "the first reading")
        yield server


@contextlib.contextmanager
def watch_command(
    folder: RunFolder, program: Sequence[str] = ("-m", "grpo_ray.cli"), *arguments: str
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run `grpo-ray watch` in a process of its own, and give the process and the page's URL.

    `program` are Python's arguments in place of those of the command, and `arguments` follow the path of the run.
    """
    command = [sys.executable, *program, "watch", str(folder.local), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stderr is not None
            line = process.stdout.readline()
            # Without a line, the command has ended, and its error output as well.
            assert line.startswith(f"watching {folder.local} at http://127.0.0.1:"), line or process.stderr.read()
            yield process, line.split(" at ")[1].split()[0]
        finally:
            process.kill()


def request(
    port: int, path: str, method: str = "GET", host: str | None = None
) -> tuple[http.client.HTTPResponse, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, headers={"Host": host} if host else {})
        response = connection.getresponse()
        return response, response.read()
    finally:
        connection.close()


def state_of(server: WatchServer) -> dict[str, Any]:
    return json.loads(request(server.port, "/api/state")[1])
