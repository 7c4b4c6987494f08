"""Commands and settings of each server and worker. `grpo up` runs them here, deploy/compose.yaml in containers."""

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from schemas.errors import UserError

HOST = "127.0.0.1"
WORKDIR = "GRPO_WORKDIR"
"""Environment variable: the folder of the user's config files. Without it, the check of parameters reads presets only."""
QUIET = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
"""Settings without which the servers report to their vendors, and MLflow prints its addresses into the logs of runs."""
DATABASES = ("prefect", "mlflow")
VARIABLE = "GRPO_POSTGRES"
"""Environment variable: postgresql://USER:PASSWORD@HOST:PORT keeps the tables of both servers in that PostgreSQL."""


def prefect_command(port: int) -> list[str]:
    """The Prefect server: arguments after `python -m`."""
    return ["grpo_tasks.operating.guarded_servers", "--host", HOST, "--port", str(port)]


def prefect_environment(port: int, postgres: str | None) -> dict[str, str]:
    """Environment variables of the Prefect server."""
    settings = {
        "PREFECT_SERVER_API_HOST": HOST,
        # The web page calls the port in this setting, not the one given as --port.
        "PREFECT_SERVER_API_PORT": str(port),
        # A GPU slot whose holder was killed becomes free when this service notices.
        "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "5",
    }
    if postgres:
        settings["PREFECT_API_DATABASE_CONNECTION_URL"] = database_url(postgres, "postgresql+asyncpg", "prefect")
    return settings


def mlflow_command(port: int) -> list[str]:
    """The MLflow server: arguments after `python -m`."""
    return ["mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1", "--app-name", "same-origin"]


def mlflow_environment(postgres: str | None) -> dict[str, str]:
    """Variables of the MLflow server, its database among them (every user can read arguments); `UserError` for an http store."""
    store = os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    if postgres:
        store = database_url(postgres, "postgresql+psycopg2", "mlflow")
    elif store.startswith("http"):
        raise UserError(f"MLFLOW_TRACKING_URI already names a server: {store}", fix="unset it, or open that address in a browser")
    return {"MLFLOW_BACKEND_STORE_URI": store, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def worker_command(name: str, *queues: str) -> list[str]:
    """A worker: arguments after `python -m`. It takes the runs of `queues`, without any the runs of every queue."""
    chosen = [part for queue in queues for part in ("--work-queue", queue)]
    return ["prefect", "worker", "start", "--pool", "grpo", "--type", "process", "--name", name, *chosen]


def deploy_commands(deploy_file: Path) -> list[list[str]]:
    """Work pool, queues, deployments and automations: arguments after `python -m`. Repeating them keeps what users changed."""
    return [["grpo_tasks.operating.deployments", str(deploy_file)], ["grpo_tasks.operating.automations"]]


def free_port(wanted: int) -> int:
    """`wanted`, or the next higher port that is not in use; raises UserError where a hundred ports in a row are."""
    for port in range(wanted, wanted + 100):
        with socket.socket() as probe:
            # Without this, a port counts as taken for a minute after its server has stopped.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
            return port
    raise UserError(f"no free port from {wanted} to {wanted + 99}", fix="name another with --prefect-port or --mlflow-port")


def database_url(postgres: str, driver: str, database: str) -> str:
    """Such as postgresql+asyncpg://USER:PASSWORD@HOST:PORT/prefect; raises UserError if `postgres` is no PostgreSQL address."""
    parts = urlsplit(postgres)
    if not parts.scheme.startswith("postgres") or not parts.hostname:
        raise UserError(f"not the address of a PostgreSQL server: {postgres}", fix="postgresql://USER:PASSWORD@HOST:PORT")
    return urlunsplit((driver, parts.netloc, f"/{database}", parts.query, ""))


def create_databases(postgres: str) -> None:
    """Create the databases that do not exist yet; raises UserError where the server does not answer."""
    try:
        import psycopg2
    except ImportError as error:
        raise UserError("PostgreSQL needs psycopg2", fix="pip install -c deploy/constraints.txt '.[server]'") from error
    try:
        connection = psycopg2.connect(database_url(postgres, "postgresql", "postgres"))
    except psycopg2.OperationalError as error:
        raise UserError(
            f"PostgreSQL does not answer: {error}", fix="check that it is running, and check user and password"
        ) from error
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("SELECT datname FROM pg_database")
        existing = {row[0] for row in cursor.fetchall()}
        for name in DATABASES:
            if name not in existing:
                cursor.execute(f"CREATE DATABASE {name}")
    connection.close()
