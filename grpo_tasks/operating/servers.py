"""Servers and workers of one folder, on the loopback address only, started and stopped together.

`Stack.start` starts the Prefect server, the MLflow server, pool, queues, deployments and workers, or what of them is not running;
`stop` ends exactly the processes that it started (pid and start time). `supervise` starts again what ends: in the process of
`grpo ui`, for `grpo up` in another one, `python -m grpo_tasks.operating.servers FOLDER`.

FOLDER/.grpo/stack.json records what was started; the logs are next to it. Nobody watches the supervisor itself: `grpo up` starts
it again with everything else that has ended. Both servers use SQLite, or one PostgreSQL server.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from grpo_tasks.kit.files import replacing
from grpo_tasks.kit.lock import file_lock
from grpo_tasks.operating import commands
from grpo_tasks.operating.commands import HOST, QUIET, VARIABLE, WORKDIR
from grpo_tasks.processes.lifetime import TOLERANCE_S, ProcessIdentity, undisturbed
from grpo_tasks.processes.serve import wait_until_up
from schemas.errors import UserError

START_LIMIT_S = 120.0
STOP_GRACE_S = 15.0
FOLDER = ".grpo"
STATE, ADDRESSES, LOCK, STARTING = "stack.json", "addresses.json", "stack.lock", "starting.json"
PREFECT, MLFLOW, SUPERVISOR = "Prefect server", "MLflow server", "supervisor"
POLL_S = 0.5
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
"""Pause after the first restart of a process, and the longest one; a process that ends sooner than the pause doubles it."""
MOST_LOG_BYTES = 20 * 2**20
"""Size of a log of a server or worker from which it is rotated."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the two servers answer, and where they keep their tables."""

    prefect: str
    mlflow: str
    postgres: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of every process that uses the servers."""
        return {"PREFECT_API_URL": f"{self.prefect}/api", "MLFLOW_TRACKING_URI": self.mlflow}


class Stack:
    """The servers and workers of one folder. `report` gets a line of text for each thing that takes time."""

    def __init__(self, workdir: Path, *, report: Callable[[str], None] = lambda _: None) -> None:
        self.workdir = workdir.resolve()
        self.folder = self.workdir / FOLDER
        self._report = report
        self._processes: dict[str, ProcessIdentity] = {}
        self._spawned: list[subprocess.Popen[bytes]] = []

    def start(
        self,
        prefect_port: int,
        mlflow_port: int,
        *,
        postgres: str | None,
        deploy_file: Path,
        workers: int = 1,
        supervised: bool = True,
    ) -> Addresses:
        """Start everything and wait until it answers, or what has ended of a stack that runs here already, at its addresses.

        `supervised` adds a process that starts again what ends later. Without it, the caller calls `supervise`. `UserError` where
        a complete stack runs here already, or a server does not start (then everything is stopped again).
        """
        self.folder.mkdir(exist_ok=True)
        begins = False
        try:
            # Another `grpo up` waits here until the servers of this one are recorded, and then reports them.
            with self._locked():
                begins = not self.running() or self._was_interrupted()
                at = self._start_missing(prefect_port, mlflow_port, postgres, begins=begins)
            self._wait_for(f"{at.prefect}/api/health", PREFECT)
            self._wait_for(f"{at.mlflow}/health", MLFLOW)
            if begins:
                self._deploy(at, deploy_file)
                with self._locked():
                    # As it is by now: another command may have stopped everything, or started something again.
                    self.check()
                    self._processes = self._recorded()
                    names = [f"worker {number}" for number in range(1, workers + 1)] + [SUPERVISOR] * supervised
                    for name in [name for name in names if name not in self.running()]:
                        self._spawn(name, at, postgres)
                    (self.folder / STARTING).unlink(missing_ok=True)
        except BaseException:
            if begins and self._spawned:
                self.stop()
            raise
        return at

    def _start_missing(self, prefect_port: int, mlflow_port: int, postgres: str | None, *, begins: bool) -> Addresses:
        """Start both servers, or what has ended of a stack that runs or whose start was interrupted."""
        running, recorded = self.running(), self._recorded()
        if running:
            at, self._processes = self.addresses(), recorded
            missing = [name for name in dict.fromkeys((PREFECT, MLFLOW, *recorded)) if name not in running]
            if not missing and not begins:
                raise UserError(
                    f"a stack runs here already: Prefect {at.prefect}, MLflow {at.mlflow}",
                    place=str(self.folder / STATE),
                    fix="use it, or stop it with grpo down",
                )
            if at.postgres != bool(postgres):
                keeps = "keeps" if at.postgres else "does not keep"
                raise UserError(
                    f"{', '.join(missing) or 'a start'} had ended, and this stack {keeps} its tables in PostgreSQL",
                    place=str(self.folder / ADDRESSES),
                    fix=f"repeat the command {'with' if at.postgres else 'without'} {VARIABLE}",
                )
            if begins:
                self._report("an earlier start was interrupted; completing it")
        else:
            prefect_port, mlflow_port = self._port_for(PREFECT, prefect_port), self._port_for(MLFLOW, mlflow_port)
            at = Addresses(f"http://{HOST}:{prefect_port}", f"http://{HOST}:{mlflow_port}", bool(postgres))
            (self.folder / ADDRESSES).write_text(json.dumps(asdict(at)), encoding="utf-8")
            self._processes, missing = {}, [PREFECT, MLFLOW]
        if begins:
            (self.folder / STARTING).write_text(json.dumps(asdict(ProcessIdentity.of())), encoding="utf-8")
        for name in missing:
            self._spawn(name, at, postgres)
        return at

    def _was_interrupted(self) -> bool:
        """Whether the command that started the stack ended before it had started everything."""
        try:
            return not ProcessIdentity(**json.loads((self.folder / STARTING).read_text(encoding="utf-8"))).is_running()
        except FileNotFoundError:
            return False
        except (ValueError, TypeError):
            # It was killed while it wrote the file.
            return True

    def stop(self) -> list[str]:
        """Stop every recorded process, the last one started first; returns the names of those that were running."""
        if not (self.folder / STATE).exists():
            return []
        stopped = []
        # Before the lock, which it may need to restart something; alone, because its children are stopped in order.
        if (supervisor := self._recorded().get(SUPERVISOR)) and (process := supervisor.process()):
            _end(process, [process])
            stopped.append(SUPERVISOR)
        with self._locked():
            for name, each in reversed(self._recorded().items()):
                if process := each.process():
                    stopped.append(name)
                    with suppress(psutil.NoSuchProcess):
                        _end(process, [*process.children(recursive=True), process])
            for name, each in self._recorded().items():
                _end_leftovers(name, each)
            for spawned in self._spawned:
                spawned.wait()
            for name in (STATE, STARTING):
                (self.folder / name).unlink(missing_ok=True)
        return stopped

    def running(self) -> list[str]:
        """Names of the recorded processes that run."""
        return [name for name, each in self._recorded().items() if each.process()]

    def ended(self) -> list[str] | None:
        """Names of the servers and workers that have ended; None when `stop` has stopped the stack."""
        recorded = self._recorded()
        return [name for name, each in recorded.items() if name != SUPERVISOR and not each.process()] if recorded else None

    def restart(self, name: str, postgres: str | None) -> bool:
        """Start a recorded process again, unless it runs or the stack has been stopped meanwhile."""
        self._spawned = [spawned for spawned in self._spawned if spawned.poll() is None]
        with self._locked():
            self._processes = self._recorded()
            recorded = self._processes.get(name)
            if recorded is None or recorded.process():
                return False
            self._spawn(name, self.addresses(), postgres)
        return True

    def addresses(self) -> Addresses:
        """Where the running stack answers."""
        file = self.folder / ADDRESSES
        try:
            return Addresses(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError) as error:
            raise UserError(f"the addresses are damaged: {error}", place=str(file), fix="grpo down, then grpo up") from error

    def check(self) -> None:
        """Raise `UserError` if a process has ended by itself, or `grpo down` has stopped all of them."""
        known = self._recorded()
        if not known:
            raise UserError("grpo down has stopped the servers meanwhile", place=str(self.folder), fix="grpo up")
        for name, recorded in known.items():
            if recorded.process() is None:
                raise UserError(f"the {name} has ended", place=str(self._log(name)), fix="see its log")

    def _port_for(self, name: str, wanted: int) -> int:
        port = commands.free_port(wanted)
        if port != wanted:
            self._report(f"port {wanted} is in use by another program; the {name} uses {port}")
        return port

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Exclude every other process that stops this stack or starts a part of it again."""
        with file_lock(
            self.folder / LOCK, holder="a command for the servers", on_wait=lambda who: self._report(f"waiting for {who}")
        ):
            yield

    def _command(self, name: str, at: Addresses, postgres: str | None) -> tuple[list[str], dict[str, str]]:
        own = {WORKDIR: str(self.workdir)}
        if name == PREFECT:
            port = int(at.prefect.rpartition(":")[2])
            return commands.prefect_command(port), commands.prefect_environment(port, postgres) | own
        if name == MLFLOW:
            return commands.mlflow_command(int(at.mlflow.rpartition(":")[2])), commands.mlflow_environment(postgres)
        if name == SUPERVISOR:
            # The address holds a password, and every user can read the arguments of a process.
            return ["grpo_tasks.operating.servers", str(self.workdir)], {VARIABLE: postgres} if postgres else {}
        worker = f"{socket.gethostname()}-{name.removeprefix('worker ')}"
        return commands.worker_command(worker), at.environment | own

    def _spawn(self, name: str, at: Addresses, postgres: str | None) -> None:
        """Start a process, again if it is recorded."""
        if name in self._processes:
            self._report(f"the {name} had ended; starting it again (log: {self._log(name)})")
            _end_leftovers(name, self._processes[name])
        command, environment = self._command(name, at, postgres)
        # With PREFECT_API_URL, the client inside the Prefect server would talk to another server.
        inherited = {key: value for key, value in os.environ.items() if key != "PREFECT_API_URL"}
        # Started and recorded, or neither: what nobody knows of, nobody stops.
        with undisturbed(), self._log(name).open("ab") as log:
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
            self._processes[name] = ProcessIdentity.of(process.pid)
            # Replaced in one step: a kill must not leave half a record, or `grpo down` could not stop the rest.
            with replacing(self.folder / STATE) as unfinished:
                entries = [{"name": name} | asdict(each) for name, each in self._processes.items()]
                unfinished.write_text(json.dumps(entries, indent=2), encoding="utf-8")

    def _deploy(self, at: Addresses, deploy_file: Path) -> None:
        environment = os.environ | QUIET | at.environment | {WORKDIR: str(self.workdir)}
        self._report("creating the deployments")
        for command in commands.deploy_commands(deploy_file):
            done = subprocess.run(
                [sys.executable, "-m", *command], env=environment, cwd=self.workdir, capture_output=True, text=True, check=False
            )
            if done.returncode:
                output = (done.stdout + done.stderr).strip().splitlines()[-15:]
                raise UserError("\n".join([f"{' '.join(command)} failed:", *output]), fix="grpo doctor")

    def _wait_for(self, url: str, name: str) -> None:
        self._report(f"waiting for the {name}")
        if not wait_until_up(url, START_LIMIT_S, is_ours=lambda: self._listens(name, url)):
            limit = f"the {name} did not answer within {START_LIMIT_S:.0f} s"
            raise UserError(limit, place=str(self._log(name)), fix="grpo doctor")

    def _listens(self, name: str, url: str) -> bool:
        """Whether the server that answers at `url` is ours: that of another folder may have taken the port meanwhile."""
        self.check()
        port = urlsplit(url).port
        try:
            server = psutil.Process(self._recorded()[name].pid)
            for process in (server, *server.children(recursive=True)):
                if any(one.laddr.port == port for one in process.net_connections() if one.status == psutil.CONN_LISTEN):
                    return True
        except psutil.NoSuchProcess:
            return False
        except psutil.AccessDenied:
            # Some systems hide who listens. Then the answer has to do.
            return True
        return False

    def _recorded(self) -> dict[str, ProcessIdentity]:
        state = self.folder / STATE
        if not state.exists():
            return {}
        try:
            found = json.loads(state.read_text(encoding="utf-8"))
            return {fields.pop("name"): ProcessIdentity(**fields) for fields in found}
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(
                f"the record of the running servers is damaged: {error}",
                place=str(state),
                fix="stop the servers by hand (ps lists prefect and mlflow), then remove that file",
            ) from error

    def _log(self, name: str) -> Path:
        return self.folder / f"{name.lower().replace(' ', '-')}.log"


def _end_leftovers(name: str, recorded: ProcessIdentity) -> None:
    """Kill what a server that has ended left behind: its own processes would keep the port. Runs of a worker continue."""
    if name not in (PREFECT, MLFLOW):
        return
    with suppress(psutil.NoSuchProcess):
        if abs(psutil.Process(recorded.pid).create_time() - recorded.born) > TOLERANCE_S:
            return  # another process has the pid by now, so the session of ours is empty
    for process in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError, PermissionError):
            # Each recorded process leads a session; the kernel reuses its number only when the session is empty.
            if os.getsid(process.pid) == recorded.pid and process.create_time() > recorded.born - TOLERANCE_S:
                process.kill()


def _end(process: psutil.Process, family: list[psutil.Process]) -> None:
    with suppress(psutil.NoSuchProcess):
        process.terminate()
    _, alive = psutil.wait_procs(family, timeout=STOP_GRACE_S)
    for left in alive:
        left.kill()
    psutil.wait_procs(alive, timeout=5)


class Restarts:
    """When each process may be started again."""

    def __init__(self) -> None:
        self._pause_s: dict[str, float] = {}
        self._started_at: dict[str, float] = {}

    def due(self, name: str, now: float) -> bool:
        """Whether the process may be started at `now` (seconds of a monotonic clock)."""
        return name not in self._started_at or now - self._started_at[name] >= self._pause_s[name]

    def started(self, name: str, now: float) -> None:
        """Note a restart. The pause before the next one doubles, unless the process had run for the longest pause."""
        steady = name not in self._started_at or now - self._started_at[name] > 2 * LONGEST_PAUSE_S
        self._pause_s[name] = FIRST_PAUSE_S if steady else min(2 * self._pause_s[name], LONGEST_PAUSE_S)
        self._started_at[name] = now


def supervise(stack: Stack, postgres: str | None, *, stop_requested: Callable[[], bool] = lambda: False) -> None:
    """Start again whatever ends, until `stop_requested` or until `grpo down` has stopped the stack.

    A process that ends again at once is started less and less often, up to once a minute: its log says why.
    """
    restarts = Restarts()
    while not stop_requested() and (ended := stack.ended()) is not None:
        rotate_logs(stack.folder)
        for name in ended:
            now = time.monotonic()
            if restarts.due(name, now) and stack.restart(name, postgres):
                restarts.started(name, now)
        time.sleep(POLL_S)


def rotate_logs(folder: Path, *, most_bytes: int = MOST_LOG_BYTES) -> list[Path]:
    """Move what a log holds beyond `most_bytes` to NAME.log.1, which replaces an older one; returns the logs that were moved.

    The processes keep their files open and append, so they go on at the start of the cut file. A few lines may be lost.
    """
    moved = []
    for log in folder.glob("*.log"):
        # A full disk is no reason to stop supervising.
        with suppress(OSError):
            if log.stat().st_size > most_bytes:
                shutil.copyfile(log, log.with_suffix(".log.1"))
                os.truncate(log, 0)
                moved.append(log)
    return moved


def main(folder: Path) -> None:
    """Supervise the stack of `folder`."""
    signals: list[int] = []
    # A flag instead of an exception: a process that was started but not recorded could not be stopped.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    stack = Stack(folder, report=lambda line: print(time.strftime("%Y-%m-%d %H:%M:%S"), line, flush=True))
    supervise(stack, os.environ.get(VARIABLE), stop_requested=lambda: bool(signals))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
