"""A stand-in server in a process of its own: what can be killed, frozen and drained as a real engine can.

The child's standard input is a pipe from here: orders go in line by line, and its end tells the child that we are
gone. Nothing is left behind when the parent dies, however it dies.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .controls import Controls

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from .options import ServerOptions

_START_S = 60.0
_ANSWER_S = 30.0


class GpuProcess(Controls):
    """Handle of a spawned stand-in. Any thread may call it; as a context manager it stops the process at the end."""

    def __init__(self, options: ServerOptions) -> None:
        self.options = options
        self._lock = threading.Lock()
        self._buffer = b""
        self._ready: dict[str, Any] | None = None
        command = [sys.executable, "-P", "-m", "gpuroute.testing", json.dumps(asdict(options)), str(os.getpid())]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, env=_environment())
        self._finalizer = weakref.finalize(self, _reap, self._process)

    def ready(self) -> Self:
        """Wait until it listens. Raises ConnectionError if it could not or died, TimeoutError after 60 s."""
        with self._lock:
            if self._ready is None:
                told = self._read_line(_START_S)
                if "error" in told:
                    raise ConnectionError(f"stand-in process {self.pid} did not start: {told['error']}")
                self._ready = told
        return self

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`, without a trailing slash; waits for the start."""
        self.ready()
        assert self._ready is not None
        return str(self._ready["url"])

    @property
    def port(self) -> int:
        """The port it listens on."""
        self.ready()
        assert self._ready is not None
        return int(self._ready["port"])

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs (frozen counts)."""
        return self._process.poll() is None

    def control(self, do: str, **arguments: Any) -> Any:
        """Give an order and wait until it is in force. Raises TimeoutError if the process is frozen."""
        self.ready()
        with self._lock:
            try:
                os.write(self._stdin, json.dumps({"do": do, **arguments}).encode() + b"\n")
            except OSError as error:
                raise ConnectionError(f"stand-in process {self.pid} is gone") from error
            answer = self._read_line(_ANSWER_S)
        if "error" in answer:
            raise ValueError(answer["error"])
        return answer["result"]

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone. Idempotent."""
        if self.alive:
            self._process.kill()
        self._process.wait()

    def freeze(self) -> None:
        """SIGSTOP: sockets stay open, connects are accepted by the kernel, nothing is answered."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        """SIGTERM, as a deploy sends it: drain, then exit. Does not wait."""
        self._process.send_signal(signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the exit and return its code. Raises TimeoutError."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError(f"stand-in process {self.pid} still runs after {timeout} s") from error

    def stop(self) -> None:
        """End it at once. Idempotent."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self.ready()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _stdin(self) -> int:
        assert self._process.stdin is not None
        return self._process.stdin.fileno()

    def _read_line(self, timeout: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        deadline = time.monotonic() + timeout
        while b"\n" not in self._buffer:
            if not select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError(f"no answer from stand-in process {self.pid} within {timeout:g} s")
            data = os.read(descriptor, 1 << 16)
            if not data:
                raise ConnectionError(f"stand-in process {self.pid} is gone")
            self._buffer += data
        line, _, self._buffer = self._buffer.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer


def _environment() -> dict[str, str]:
    """Ours, and the way to this package: the child must not depend on the working directory."""
    root = str(Path(__file__).parents[2])
    given = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, given] if given else [root])}


def _reap(process: subprocess.Popen[bytes]) -> None:
    """Kill and collect a child, and close its pipes."""
    if process.poll() is None:
        process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
