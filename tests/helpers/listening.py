"""Addresses on which the processes of a test listen for TCP connections."""

import ipaddress
import threading
from contextlib import suppress
from typing import Self

import psutil

SECONDS_BETWEEN = 0.1


def open_ports() -> set[tuple[str, str]]:
    """Return (name of the process, address) of each listener below this process that other machines reach."""
    found = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):  # it has ended meanwhile
            for connection in process.net_connections(kind="tcp"):
                if connection.status == psutil.CONN_LISTEN and not is_loopback(connection.laddr.ip):
                    found.add((name_of(process), connection.laddr.ip))
    return found


def name_of(process: psutil.Process) -> str:
    """Return its command; of a Ray worker the actor, without the method that runs at the moment."""
    command = " ".join(process.cmdline()).strip()
    return command.partition(".")[0] if command.startswith("ray::") else command[:60]


def is_loopback(address: str) -> bool:
    parsed = ipaddress.ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return (mapped or parsed).is_loopback


class PortWatch:
    """Thread that collects `open_ports` while the block runs."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stop.wait(SECONDS_BETWEEN):
            self.found |= open_ports()
