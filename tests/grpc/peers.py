"""Real inference servers in processes of their own: MLServer, and Triton where it is installed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Self

import pytest
from ports import own_ports

# Read before the test suite takes all GPUROUTE_* variables away.
MLSERVER = os.environ.get("GPUROUTE_TEST_MLSERVER", "")
TRITON = os.environ.get("GPUROUTE_TEST_TRITON", "")
HERE = Path(__file__).parent
PATIENCE_S = 100


class Peer:
    """One server. `url` is its gRPC registry URL, `http_url` the other one, if it speaks HTTP too."""

    def __init__(self, command: list[str], grpc_port: int, env: dict[str, str], log: Path, http_port: int = 0) -> None:
        self.url = f"grpc://127.0.0.1:{grpc_port}"
        self.http_url = f"http://127.0.0.1:{http_port}"
        self.port = grpc_port
        self.log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command, env=os.environ | env, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )

    def drain(self) -> None:
        """SIGTERM, as an orchestrator would."""
        self._process.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def wait_ready(self, model: str) -> Self:
        """Return once the model is ready, asked by our own probe."""
        import grpc

        from gpuroute.grpc import health

        until = time.monotonic() + PATIENCE_S
        with grpc.insecure_channel(f"ipv4:127.0.0.1:{self.port}") as channel:
            while time.monotonic() < until and self._process.poll() is None:
                try:
                    if health.ask(channel, health.triton_ready(model), timeout=1):
                        return self
                except grpc.RpcError:
                    pass
                time.sleep(0.1)
        raise AssertionError(f"not ready: {self.log.read_text(errors='replace')[-2000:]}")


def mlserver(name: str, directory: Path) -> Peer:
    """An MLServer with the model `echo`. Skips the test where it is not installed."""
    program = Path(MLSERVER) / "bin" / "mlserver"
    if not MLSERVER or not program.exists():
        pytest.skip("no MLServer: run tests/grpc/install_mlserver.sh VENV and set GPUROUTE_TEST_MLSERVER=VENV")
    models = directory / name
    shutil.copytree(HERE / "mlserver_model", models)
    http, grpc_port, metrics = own_ports(3)
    env = {
        "MLSERVER_HOST": "127.0.0.1",
        "MLSERVER_HTTP_PORT": str(http),
        "MLSERVER_GRPC_PORT": str(grpc_port),
        "MLSERVER_METRICS_PORT": str(metrics),
        "MLSERVER_PARALLEL_WORKERS": "0",
        "SERVER_NAME": name,
        "PYTHONPATH": str(models),
    }
    return Peer([str(program), "start", str(models)], grpc_port, env, directory / f"{name}.log", http)


def triton(name: str, directory: Path) -> Peer:
    """A Triton server (of the package nvidia-pytriton) with the models beside this file. Skips where there is none."""
    python = Path(TRITON) / "bin" / "python"
    if not TRITON or not python.exists():
        pytest.skip("no Triton: a venv with nvidia-pytriton==0.7.0 (CPython 3.11) in GPUROUTE_TEST_TRITON")
    ask = "import sysconfig; print(sysconfig.get_paths()['purelib'], sysconfig.get_config_var('LIBDIR'))"
    site, libraries = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True).stdout.split()
    server = Path(site, "pytriton", "tritonserver")
    backend = directory / name / "backends" / "python"
    shutil.copytree(server / "backends" / "python", backend)
    shutil.copy(server / "python_backend_stubs" / "3.11" / "triton_python_backend_stub", backend)
    http, grpc_port, metrics = own_ports(3)
    command = [
        str(server / "bin" / "tritonserver"),
        f"--model-repository={HERE / 'triton_models'}",
        f"--backend-directory={backend.parent}",
        f"--cache-directory={server / 'caches'}",
        "--http-address=127.0.0.1",
        f"--http-port={http}",
        "--grpc-address=127.0.0.1",
        f"--grpc-port={grpc_port}",
        f"--metrics-port={metrics}",
        "--allow-gpu-metrics=false",
    ]
    env = {
        "LD_LIBRARY_PATH": f"{libraries}:{Path(site, 'nvidia_pytriton.libs')}",
        "PYTHONPATH": site,
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    return Peer(command, grpc_port, env, directory / f"{name}.log", http)


if __name__ == "__main__":
    sys.exit("a module for tests")
