"""`GpuServer`: a stand-in inference server in this process, on a real socket."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .controls import Controls
from .host import Host
from .options import ServerOptions

if TYPE_CHECKING:
    import ssl
    from types import TracebackType
    from typing import Self

    from .process import GpuProcess

_START_S = 60.0


class GpuServer(Controls):
    """A stand-in for vLLM on one GPU: OpenAI and Anthropic interfaces, timing by a model of continuous batching.

    `with GpuServer(gpu="A100") as server:` runs it in a thread of this process; `GpuServer.spawn(...)` gives it a
    process of its own, which can be killed and frozen. Options: `ServerOptions`. Any thread may call the methods.
    """

    def __init__(self, *, ssl_context: ssl.SSLContext | None = None, **options: Any) -> None:
        self.options = ServerOptions.of(options)
        self._ssl = ssl_context
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._host: Host | None = None
        self._error: BaseException | None = None

    @classmethod
    def spawn(cls, *, wait: bool = True, **options: Any) -> GpuProcess:
        """Start one as a process; with `wait=False` it starts while others do, until its `url` is asked for.

        Raises TypeError or ConfigError for options that cannot be, ConnectionError if it could not start (port taken).
        """
        from .process import GpuProcess

        process = GpuProcess(ServerOptions.of(options))
        if wait:
            process.ready()
        return process

    def start(self) -> Self:
        """Listen. Raises OSError if the port is taken, RuntimeError if already started."""
        if self._thread is not None:
            raise RuntimeError("this GpuServer is already running")
        started = threading.Event()
        self._thread = threading.Thread(target=self._main, args=(started,), name="gpuroute-gpu-server", daemon=True)
        self._thread.start()
        if not started.wait(_START_S):
            raise TimeoutError(f"the stand-in server did not start within {_START_S:g} s")
        if self._error is not None:
            self._thread.join()
            self._thread = None
            raise self._error
        return self

    def stop(self) -> None:
        """Close all connections and end the thread. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None and self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """`http://127.0.0.1:PORT`, without a trailing slash."""
        return self._running().url

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._running().port

    def kill(self) -> None:
        """Behave as a crashed process: every connection is reset, connects are refused, the cache is lost."""
        self.control("kill")

    def control(self, do: str, **arguments: Any) -> Any:
        """Give an order by name and wait until it is in force."""
        order = self._running().order({"do": do, **arguments})
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(order, self._loop).result(_START_S)

    def _running(self) -> Host:
        if self._host is None or self._thread is None:
            raise ConnectionError("this GpuServer is not running: use `with` or start()")
        return self._host

    def _main(self, started: threading.Event) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            try:
                self._host = runner.run(self._listen())
                self.options = replace(self.options, port=self._host.port)
            except BaseException as error:  # handed to start()
                self._error = error
                return
            finally:
                started.set()
            self._loop.run_forever()
            runner.run(self._close(self._host))

    async def _listen(self) -> Host:
        host = Host(self.options, ssl_context=self._ssl)
        await host.listen()
        return host

    async def _close(self, host: Host) -> None:
        host.close()
        await asyncio.sleep(0)
