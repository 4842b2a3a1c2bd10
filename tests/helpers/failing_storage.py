"""Storage that fails: an S3 server, proxies that break connections or lose replies, and a small disk that fills up."""

import os
import re
import secrets
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
"""Environment variables for a process that uses the server. Any values are accepted, but without them the client sends
requests to the metadata service of a cloud."""


def wait_for(condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
    """Wait until a condition is true; fail the test after `seconds`. `what` names the condition in the message."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.02)


def free_port() -> int:
    """Return a port of the loopback interface that no process listens on.

    It is one that Linux gives to nobody who asks for any free port (32768 and above), and that Ray does not give to its
    workers (10002 to 19999), so that another test can hardly take it before it is used.
    """
    while True:
        with suppress(OSError), socket.create_server(("127.0.0.1", secrets.choice(range(20000, 32768)))) as server:
            return server.getsockname()[1]


def storage_path(port: int, *, user: str = "", bucket: str = BUCKET, folder: str = "runs") -> str:
    """Return `run.storage_path` for a server at a port of this machine.

    user: `key:secret@`, or "" if the environment has CREDENTIALS.
    """
    return f"s3://{user}{bucket}/{folder}?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"


class S3Server:
    """moto's S3 server with one bucket, in its own process, with all data in memory: `with S3Server() as s3`."""

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
        except BaseException:  # an interrupt too must not leave the server
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
    """TCP proxy from a free port to another port, which can be disconnected: `with Proxy(server.port) as proxy`."""

    def __init__(self, target: int):
        self.target = target
        self.port = free_port()
        self.connections = 0
        """Number of connections accepted so far."""
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._forwards = True

    @property
    def storage_path(self) -> str:
        return storage_path(self.port)

    def __enter__(self) -> Self:
        self.restore()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.disconnect()

    def disconnect(self, how: Literal["refuse", "hang"] = "refuse") -> None:
        """Close every connection; refuse new ones, or accept them and never respond."""
        with self._lock:
            if how == "refuse":
                listener, self._listener = self._listener, None
                if listener is not None:
                    _close(listener)
            self._forwards = False
            for connection in self._open:
                _close(connection)
            self._open.clear()

    def restore(self) -> None:
        """Accept and forward new connections again; close those that were accepted while disconnected."""
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
            except OSError:  # the listener was closed
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
            self._connect(client, server)

    def _connect(self, client: socket.socket, server: socket.socket) -> None:
        for one, other in ((client, server), (server, client)):
            threading.Thread(target=_pump, args=(one, other), daemon=True).start()


class LossyProxy(Proxy):
    """HTTP proxy that loses replies: the request is carried out, then its connection breaks.

    Args:
        target: port of the server.
        loses: returns True for a request, given as method and path, whose reply is to be lost.
    """

    def __init__(self, target: int, loses: Callable[[str, str], bool]):
        super().__init__(target)
        self.loses = loses
        self.lost: list[str] = []
        """Requests whose reply was lost."""

    def _connect(self, client: socket.socket, server: socket.socket) -> None:
        request: list[str] = [""]

        def pump_requests() -> None:
            with suppress(OSError):
                while block := client.recv(1 << 16):
                    if line := re.match(rb"([A-Z]+) (\S+) HTTP/1", block):
                        request[0] = f"{line[1].decode()} {line[2].decode().partition('?')[0]}"
                    server.sendall(block)
            _close(server)

        def pump_replies() -> None:
            with suppress(OSError):
                while block := server.recv(1 << 16):
                    # "100 Continue" and the final reply may come in one block.
                    reply = block.partition(b"\r\n\r\n")[2] if block.startswith(b"HTTP/1.1 100") else block
                    if reply.startswith(b"HTTP/1") and self.loses(*request[0].split(" ")):
                        self.lost.append(request[0])
                        break
                    client.sendall(block)
            _close(client)
            _close(server)

        for pump in (pump_requests, pump_replies):
            threading.Thread(target=pump, daemon=True).start()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while block := source.recv(1 << 16):
            target.sendall(block)
    _close(source)
    _close(target)


def _close(connection: socket.socket) -> None:
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # wakes a thread that is blocked in it; closing alone does not
    connection.close()


@contextmanager
def small_disk(folder: Path, size: str = "256k") -> Iterator[Path]:
    """Mount a disk in memory at a new folder; skip the test where mounting is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={size},mode=777", "tmpfs", str(folder)],
            check=True,
            capture_output=True,
        )
    except (OSError, subprocess.CalledProcessError) as error:
        message = getattr(error, "stderr", b"") or str(error).encode()
        pytest.skip(f"no disk can be mounted here: {message.decode(errors='replace').strip()}")
    try:
        yield folder
    finally:
        # Lazy: unmounting must not wait for files that are still open.
        subprocess.run(["umount", "--lazy", str(folder)], check=True, capture_output=True)


def fill(folder: Path, leave: int = 0) -> Path:
    """Fill a disk except for `leave` bytes, rounded to blocks; return the file to delete to make room."""
    path = folder / "filler"
    with suppress(OSError), open(path, "wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    if leave:
        os.truncate(path, path.stat().st_size - leave)
    return path
