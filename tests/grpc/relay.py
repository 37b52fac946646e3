"""A TCP relay in front of a server, for what happens between the two."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from world import Server


class Relay:
    """Passes on what comes, both ways. `taken`: the connections of clients, `made`: those to the server."""

    def __init__(self, server: Server) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.listens_at: int = self._listener.getsockname()[1]
        self.url = f"grpc://127.0.0.1:{self.listens_at}"
        self.taken: list[socket.socket] = []
        self.made: list[socket.socket] = []
        self._port = server.port
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def pump(self) -> Callable[[socket.socket, socket.socket], None]:
        """What carries the bytes of a new connection from one socket to the other, in a thread."""
        return pass_on

    def let_nobody_in(self) -> None:
        """Those who are in stay."""
        with contextlib.suppress(OSError):  # closing alone would let one more in: the thread waits for it
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()

    def close(self) -> None:
        self.let_nobody_in()
        for sock in (*self.taken, *self.made):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            there = socket.create_connection(("127.0.0.1", self._port))
            self.taken.append(here)
            self.made.append(there)
            pump = self.pump()
            for ends in ((here, there), (there, here)):
                threading.Thread(target=pump, args=ends, daemon=True).start()


def pass_on(source: socket.socket, target: socket.socket) -> None:
    """Until one side ends."""
    with contextlib.suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
