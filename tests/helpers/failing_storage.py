"""Storage that fails: an S3 server, a proxy before it that can be cut, and a disk that is soon full."""

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import pytest

BUCKET = "bucket"
CREDENTIALS = {"AWS_ACCESS_KEY_ID": "somebody", "AWS_SECRET_ACCESS_KEY": "their-secret"}
"""What a process must have in its environment to use the server; any will do, but without some the client looks for
a cloud's own address."""


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait until something is so; fails the test if it never is."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.02)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def storage_path(port: int, *, user: str = "", bucket: str = BUCKET, folder: str = "runs") -> str:
    """What `run.storage_path` is for a server at a port of this machine.

    user: `key:secret@`, or nothing where the environment holds CREDENTIALS.
    """
    return f"s3://{user}{bucket}/{folder}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"


class S3Server:
    """moto's S3 server with one bucket, in a process of its own: `with S3Server() as s3`. It keeps all in memory."""

    def __init__(self) -> None:
        self.port = free_port()

    @property
    def storage_path(self) -> str:
        return storage_path(self.port)

    def __enter__(self) -> Self:
        pytest.importorskip("moto.server", reason="no moto")
        from pyarrow.fs import S3FileSystem

        self._process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            wait_for(self._answers, "the S3 server")
            S3FileSystem(
                access_key=CREDENTIALS["AWS_ACCESS_KEY_ID"],
                secret_key=CREDENTIALS["AWS_SECRET_ACCESS_KEY"],
                endpoint_override=f"127.0.0.1:{self.port}",
                scheme="http",
                region="us-east-1",
                allow_bucket_creation=True,
            ).create_dir(BUCKET)
        except BaseException:
            self._stop()
            raise
        return self

    def _answers(self) -> bool:
        assert self._process.poll() is None, f"the S3 server ended with status {self._process.returncode}"
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), timeout=1):
            return True
        return False

    def _stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._stop()


class Proxy:
    """A port of this machine that leads to another one, until it is cut: `with Proxy(server.port) as proxy`."""

    def __init__(self, target: int):
        self.target = target
        self.port = free_port()
        self.connections = 0
        """How many were accepted so far."""
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._forwards = True

    @property
    def storage_path(self) -> str:
        return storage_path(self.port)

    def __enter__(self) -> Self:
        self.mend()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.cut()

    def cut(self, how: Literal["refuse", "hang"] = "refuse") -> None:
        """End every connection; refuse new ones, or accept them and never answer."""
        with self._lock:
            if how == "refuse":
                listener, self._listener = self._listener, None
                if listener is not None:
                    _close(listener)
            self._forwards = False
            for connection in self._open:
                _close(connection)
            self._open.clear()

    def mend(self) -> None:
        """Accept and forward connections, as in the beginning. Those that hung are ended."""
        with self._lock:
            self._forwards = True
            for connection in self._open:
                _close(connection)
            self._open.clear()
            if self._listener is None:
                self._listener = socket.create_server(("127.0.0.1", self.port))
                threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                client, _ = listener.accept()
            except OSError:  # cut
                return
            with self._lock:
                self.connections += 1
                self._open.add(client)
                if not self._forwards:
                    continue
                try:
                    server = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    _close(client)
                    continue
                self._open.add(server)
            for one, other in ((client, server), (server, client)):
                threading.Thread(target=_pump, args=(one, other), daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while block := source.recv(1 << 16):
            target.sendall(block)
    _close(source)
    _close(target)


def _close(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits in it, which closing alone does not
    connection.close()


@contextmanager
def small_disk(folder: Path, size: str = "256k") -> Iterator[Path]:
    """A disk in memory, mounted at a folder that is made for it. Skips the test where mounting is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size},mode=777", "tmpfs", str(folder)],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", b"") or str(error).encode()
        pytest.skip(f"no disk can be mounted here: {said.decode(errors='replace').strip()}")
    try:
        yield folder
    finally:
        # Lazily: a file that is still open must not keep the test from ending.
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def fill(folder: Path, leave: int = 0) -> Path:
    """Fill a disk to the last byte but `leave`, rounded to its blocks; deleting the file that is given makes room."""
    path = folder / "filler"
    with suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    if leave:
        os.truncate(path, path.stat().st_size - leave)
    return path
