"""Servers and workers on one machine, on the loopback address only, ended together.

    Stack(folder).start()  ->  Prefect server, MLflow server  ->  pool, queues, deployments  ->  worker
    Stack(folder).start()  again: the parts that have ended meanwhile, and only those
    Stack(folder).stop()   ->  ends exactly the processes that `start` began (pid and time of birth), nothing else

What was started stands in FOLDER/.grpo/stack.json, the logs beside it. SQLite by default; one PostgreSQL address puts
both servers there.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import psutil

from grpo_tasks.processes.identity import ProcessIdentity
from schemas.errors import UserError

HOST = "127.0.0.1"
START_LIMIT_S = 120.0
STOP_GRACE_S = 15.0
FOLDER = ".grpo"
STATE, ADDRESSES = "stack.json", "addresses.json"
PREFECT, MLFLOW = "Prefect server", "MLflow server"
DATABASE = "GRPO_POSTGRES"
"""Environment variable: postgresql://USER:PASSWORD@HOST:PORT puts both servers on that PostgreSQL."""


@dataclass(frozen=True, slots=True)
class Part:
    """A process of the stack."""

    name: str
    pid: int
    born: float

    def process(self) -> psutil.Process | None:
        """The process; None when it has ended."""
        return ProcessIdentity(self.pid, self.born).process()


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the two servers answer, and where they keep what they know."""

    prefect: str
    mlflow: str
    postgres: bool = False
    """Whether both keep their tables in PostgreSQL."""

    @property
    def environment(self) -> dict[str, str]:
        """For everything that is to use them."""
        return {"PREFECT_API_URL": f"{self.prefect}/api", "MLFLOW_TRACKING_URI": self.mlflow}


class Stack:
    """The servers of one working directory."""

    def __init__(self, workdir: Path, *, tell: Callable[[str], None] = lambda _: None) -> None:
        self.workdir = workdir.resolve()
        self.folder = self.workdir / FOLDER
        self._tell = tell
        self._parts: dict[str, Part] = {}
        self._spawned: list[subprocess.Popen[bytes]] = []

    def start(
        self, prefect_port: int, mlflow_port: int, *, postgres: str | None, deploy_file: Path, workers: int = 1
    ) -> Addresses:
        """Everything up and answering. Where a stack runs already, the parts of it that have ended are started again.

        Returns:
            Its addresses: those it has already, if so.

        Raises:
            UserError: a whole stack runs here already, or a part does not come up (a new stack is ended again).
        """
        if self.alive():
            return self._mend(postgres)
        self.folder.mkdir(exist_ok=True)
        prefect_port, mlflow_port = free_port(prefect_port), free_port(mlflow_port)
        at = Addresses(f"http://{HOST}:{prefect_port}", f"http://{HOST}:{mlflow_port}", bool(postgres))
        (self.folder / ADDRESSES).write_text(json.dumps(asdict(at)), encoding="utf-8")
        with self._ended_on_failure():
            self._spawn(PREFECT, at, postgres)
            self._spawn(MLFLOW, at, postgres)
            self._wait_for(f"{at.prefect}/api/health", PREFECT)
            self._wait_for(f"{at.mlflow}/health", MLFLOW)
            self._deploy(at, deploy_file)
            for number in range(1, workers + 1):
                self._spawn(f"worker {number}", at, postgres)
        return at

    def stop(self) -> list[str]:
        """End what is recorded here, children first to last; the names of what was still alive."""
        found = [(part, process) for part in reversed(self._recorded()) if (process := part.process())]
        for _, process in found:
            _end_tree(process)
        for process in self._spawned:
            process.wait()
        (self.folder / STATE).unlink(missing_ok=True)
        return [part.name for part, _ in found]

    def alive(self) -> list[str]:
        """Names of the recorded parts that run."""
        return [part.name for part in self._recorded() if part.process()]

    def addresses(self) -> Addresses:
        """Where the running stack answers."""
        file = self.folder / ADDRESSES
        try:
            return Addresses(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise UserError(f"the addresses are damaged: {error}", place=str(file), fix="grpo down, then grpo up") from error

    def check(self) -> None:
        """Raise `UserError` when a part has ended by itself."""
        for part in self._recorded():
            if part.process() is None:
                raise UserError(f"the {part.name} has ended", place=str(self._log(part.name)), fix="the log says why")

    def _mend(self, postgres: str | None) -> Addresses:
        at, self._parts = self.addresses(), {part.name: part for part in self._recorded()}
        missing = [name for name, part in self._parts.items() if not part.process()]
        if not missing:
            raise UserError(
                f"a stack runs here already: Prefect {at.prefect}, MLflow {at.mlflow}",
                place=str(self.folder / STATE),
                fix="use it, or end it with grpo down",
            )
        if at.postgres != bool(postgres):
            keeps = "keeps" if at.postgres else "does not keep"
            raise UserError(
                f"{', '.join(missing)} had ended, and this stack {keeps} its tables in PostgreSQL",
                place=str(self.folder / ADDRESSES),
                fix=f"the same command {'with' if at.postgres else 'without'} {DATABASE}",
            )
        for name in missing:
            self._tell(f"the {name} had ended; starting it again")
            self._spawn(name, at, postgres)
        self._wait_for(f"{at.prefect}/api/health", PREFECT)
        self._wait_for(f"{at.mlflow}/health", MLFLOW)
        return at

    def _command(self, name: str, at: Addresses, postgres: str | None) -> tuple[list[str], dict[str, str]]:
        if name == PREFECT:
            port = _port(at.prefect)
            return prefect_command(port), prefect_environment(port, postgres)
        if name == MLFLOW:
            return mlflow_command(_port(at.mlflow)), mlflow_environment(postgres)
        worker = f"{socket.gethostname()}-{name.removeprefix('worker ')}"
        return worker_command(worker), at.environment | {"GRPO_WORKDIR": str(self.workdir)}

    def _spawn(self, name: str, at: Addresses, postgres: str | None) -> None:
        command, environment = self._command(name, at, postgres)
        # PREFECT_API_URL would make the server's own client talk to somewhere else.
        inherited = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
        with self._log(name).open("ab") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env=inherited | QUIET | environment,
                cwd=self.workdir,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        self._spawned.append(process)
        self._parts[name] = Part(name, process.pid, ProcessIdentity.of(process.pid).born)
        part = self.folder / f"{STATE}.part"
        part.write_text(json.dumps([asdict(each) for each in self._parts.values()], indent=2), encoding="utf-8")
        part.replace(self.folder / STATE)

    def _deploy(self, at: Addresses, deploy_file: Path) -> None:
        environment = os.environ | QUIET | at.environment | {"GRPO_WORKDIR": str(self.workdir)}
        self._tell("applying the deployments")
        for command in deploy_commands(deploy_file):
            done = subprocess.run(
                [sys.executable, "-m", *command], env=environment, cwd=self.workdir, capture_output=True, text=True, check=False
            )
            if done.returncode:
                said = (done.stdout + done.stderr).strip().splitlines()[-15:]
                raise UserError("\n".join([f"{' '.join(command)} failed:", *said]), fix="grpo doctor")

    def _wait_for(self, url: str, name: str) -> None:
        self._tell(f"waiting for the {name}")
        deadline = time.monotonic() + START_LIMIT_S
        while time.monotonic() < deadline:
            self.check()
            try:
                with urllib.request.urlopen(url, timeout=2) as answer:  # noqa: S310 - our own address on the loopback
                    if answer.status == 200:
                        return
            except (urllib.error.URLError, OSError):
                time.sleep(0.3)
        raise UserError(f"the {name} did not answer within {START_LIMIT_S:.0f} s", place=str(self._log(name)), fix="grpo doctor")

    @contextmanager
    def _ended_on_failure(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def _recorded(self) -> list[Part]:
        state = self.folder / STATE
        if not state.exists():
            return []
        try:
            return [Part(**fields) for fields in json.loads(state.read_text(encoding="utf-8"))]
        except (ValueError, TypeError) as error:
            raise UserError(
                f"the record of what runs here is damaged: {error}",
                place=str(state),
                fix="end what still runs by hand (ps shows prefect and mlflow), then remove that file",
            ) from error

    def _log(self, name: str) -> Path:
        return self.folder / f"{name.lower().replace(' ', '-')}.log"


QUIET = {"DO_NOT_TRACK": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}


def prefect_command(port: int) -> list[str]:
    """Arguments after `python -m`."""
    return ["grpo_tasks.operating.guarded_servers", "--host", HOST, "--port", str(port)]


def prefect_environment(port: int, postgres: str | None) -> dict[str, str]:
    """Settings of the Prefect server."""
    # The page calls the port of this setting, not the one given by --port. Dead holders of a GPU slot are looked for often.
    settings = {
        "PREFECT_SERVER_API_HOST": HOST,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_SERVER_SERVICES_REPOSSESSOR_LOOP_SECONDS": "5",
    }
    if postgres:
        settings["PREFECT_API_DATABASE_CONNECTION_URL"] = database_url(postgres, "postgresql+asyncpg", "prefect")
    return settings


def mlflow_command(port: int) -> list[str]:
    """Arguments after `python -m`."""
    return ["mlflow", "server", "--host", HOST, "--port", str(port), "--workers", "1", "--app-name", "same-origin"]


def mlflow_environment(postgres: str | None) -> dict[str, str]:
    """Settings of the MLflow server. The store is none of its arguments: everybody on the machine can read those."""
    store = os.environ.get("MLFLOW_TRACKING_URI", "sqlite:///mlflow.db")
    if postgres:
        store = database_url(postgres, "postgresql+psycopg2", "mlflow")
    elif store.startswith("http"):
        raise UserError(f"MLFLOW_TRACKING_URI is a server already: {store}", fix="unset it, or open that address in a browser")
    return {"MLFLOW_BACKEND_STORE_URI": store, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def worker_command(name: str) -> list[str]:
    """Arguments after `python -m`."""
    return ["prefect", "worker", "start", "--pool", "grpo", "--type", "process", "--name", name]


def deploy_commands(deploy_file: Path) -> list[list[str]]:
    """Pool, queues and deployments; repeating them changes nothing."""
    return [
        ["prefect", "--no-prompt", "work-pool", "create", "grpo", "--type", "process", "--overwrite"],
        ["prefect", "--no-prompt", "deploy", "--prefect-file", str(deploy_file), "--all"],
    ]


def database_url(postgres: str, driver: str, database: str) -> str:
    """The address of one database of the server."""
    parts = urlsplit(postgres)
    if not parts.scheme.startswith("postgres") or not parts.hostname:
        raise UserError(f"not the address of a PostgreSQL server: {postgres}", fix="postgresql://USER:PASSWORD@HOST:PORT")
    return urlunsplit((driver, parts.netloc, f"/{database}", parts.query, ""))


def create_databases(postgres: str) -> None:
    """The databases prefect and mlflow, where they do not exist yet."""
    try:
        import psycopg2
    except ImportError as error:
        raise UserError("PostgreSQL needs psycopg2", fix="pip install '.[server]'") from error
    try:
        connection = psycopg2.connect(database_url(postgres, "postgresql", "postgres"))
    except psycopg2.OperationalError as error:
        raise UserError(f"PostgreSQL does not answer: {error}", fix="is it started, are user and password right?") from error
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("SELECT datname FROM pg_database")
        known = {row[0] for row in cursor.fetchall()}
        for name in ("prefect", "mlflow"):
            if name not in known:
                cursor.execute(f"CREATE DATABASE {name}")
    connection.close()


def _port(address: str) -> int:
    return int(address.rpartition(":")[2])


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
    raise UserError(f"no free port from {wanted} to {wanted + 99}", fix="name another with --prefect-port or --mlflow-port")


def _end_tree(process: psutil.Process) -> None:
    """End a process with everything below it: first politely, in the end for good."""
    try:
        family = [*process.children(recursive=True), process]
        process.terminate()
    except psutil.NoSuchProcess:
        return
    _, alive = psutil.wait_procs(family, timeout=STOP_GRACE_S)
    for left in alive:
        left.kill()
    psutil.wait_procs(alive, timeout=5)
