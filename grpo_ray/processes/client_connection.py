"""A supervisor's end of the socket to its client."""

import select
import socket

_CHUNK_BYTES = 1 << 20


class ClientConnection:
    """Connection that never blocks: two blocking sides with full sockets could wait for each other for ever."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._outgoing = bytearray()
        self.incoming = bytearray()
        """Bytes received; the supervisor removes complete messages from their start."""

    def fileno(self) -> int:
        """Return the descriptor, for `select.poll`."""
        return self._sock.fileno()

    @property
    def events(self) -> int:
        """Events of `select.poll` on which to call `exchange`."""
        return select.POLLIN | (select.POLLOUT if self._outgoing else 0)

    def add(self, message: bytes) -> None:
        """Queue a message for the next `exchange`."""
        self._outgoing += message

    def send(self, message: bytes) -> None:
        """Send as much of a message as the socket accepts now; later calls of `exchange` send the rest."""
        self.add(message)
        self._flush()

    def exchange(self) -> bool:
        """Send queued bytes and receive those that have arrived; return False if the client has closed its end."""
        self._flush()
        try:
            data = self._sock.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.incoming += data
        return bool(data)

    def close(self) -> None:
        """Close a fork's copy of this end: the client notices the supervisor's end only once all copies are closed."""
        self._sock.close()

    def _flush(self) -> None:
        if not self._outgoing:
            return
        try:
            del self._outgoing[: self._sock.send(self._outgoing)]
        except BlockingIOError:
            return
        except OSError:  # the client is gone; the next read finds the end
            self._outgoing.clear()
