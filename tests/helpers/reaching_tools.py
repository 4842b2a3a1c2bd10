"""Tools that reach for things outside of their folder; see `rollout.confine`."""

import socket
import subprocess
from pathlib import Path


def read_file(path: str) -> str:
    """Read a file.

    Args:
        path: Its path.
    """
    return Path(path).read_text()


def open_socket() -> str:
    """Open a socket."""
    socket.socket()
    return "opened"


def work() -> str:
    """Do what an ordinary tool does."""
    import fractions  # which is imported late
    import sqlite3

    Path("own.txt").write_text("kept")
    sqlite3.connect("own.db").execute("create table t(a)")
    echoed = subprocess.check_output(["echo", Path("own.txt").read_text()], text=True)
    return f"{echoed.strip()} {fractions.Fraction(1, 2)}"
