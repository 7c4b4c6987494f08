"""The two user interfaces on this machine, on the loopback address only, ended together."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

from schemas.errors import UserError

HOST = "127.0.0.1"
START_LIMIT_S = 90.0


def serve_uis(prefect_port: int, mlflow_port: int, *, tell: Callable[[str], None]) -> None:
    """Start both servers, say their addresses, wait for Ctrl-C or SIGTERM, end both.

    Raises:
        UserError: a server does not come up, or ends by itself.
    """
    prefect_port, mlflow_port = free_port(prefect_port), free_port(mlflow_port)
    processes = {"Prefect": _start_prefect(prefect_port), "MLflow": _start_mlflow(mlflow_port)}
    signal.signal(signal.SIGTERM, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    try:
        _wait_for(f"http://{HOST}:{prefect_port}/api/health", "Prefect", processes)
        _wait_for(f"http://{HOST}:{mlflow_port}/health", "MLflow", processes)
        tell(f"Prefect UI  http://{HOST}:{prefect_port}")
        tell(f"MLflow UI   http://{HOST}:{mlflow_port}")
        tell("Ctrl-C ends both")
        while True:
            _check_alive(processes)
            time.sleep(0.5)
    except KeyboardInterrupt:
        tell("ending both")
    finally:
        for process in processes.values():
            end_group(process)


def free_port(wanted: int) -> int:
    """The wanted port, or the next one above that nobody listens on."""
    for port in range(wanted, wanted + 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise UserError(f"no free port from {wanted} to {wanted + 99}", mend="name another with --prefect-port or --mlflow-port")


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a server with all its workers: first politely, after ten seconds for good."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _start_prefect(port: int) -> subprocess.Popen[bytes]:
    # The page calls the port of this setting, not the one given by --port.
    environment = {"PREFECT_SERVER_API_HOST": HOST, "PREFECT_SERVER_API_PORT": str(port)}
    return _start(["prefect", "server", "start", "--host", HOST, "--port", str(port)], environment)


def _start_mlflow(port: int) -> subprocess.Popen[bytes]:
    store = os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    if store.startswith("http"):
        raise UserError(f"MLFLOW_TRACKING_URI is a server already: {store}", mend="open that address in a browser")
    command = ["mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1", "--backend-store-uri", store]
    return _start(command, {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"})


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    # PREFECT_API_URL would make the server's own client talk to somewhere else.
    inherited = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    return subprocess.Popen(
        [sys.executable, "-m", *command],
        env=inherited | environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait_for(url: str, name: str, processes: dict[str, subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        _check_alive(processes)
        try:
            with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - our own address on the loopback
                if answer.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.3)
    raise UserError(f"{name} did not answer at {url} within {START_LIMIT_S:.0f} s", mend="grpo doctor")


def _check_alive(processes: dict[str, subprocess.Popen[bytes]]) -> None:
    for name, process in processes.items():
        if process.poll() is not None:
            by_hand = "prefect server start" if name == "Prefect" else "mlflow server"
            raise UserError(
                f"the {name} server ended with code {process.returncode}", mend=f"run it by hand to see why: {by_hand}"
            )
