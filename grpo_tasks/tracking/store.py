"""The MLflow store and how it is called: without log noise, with retries while it is unreachable, with errors a user can fix.

Every call can be repeated without harm. Whatever calls a store raises `TrackingError` when it cannot be reached or refuses.
Importing this module imports mlflow, which takes seconds.
"""

import os

# mlflow reads these while it is imported; values that the user has set stay. One retry inside mlflow is enough because `call`
# retries. mlflow's default of seven would block the loop that follows a training stage for minutes when the server is down.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# A trace is stored when its call returns, so that a failure is seen and the trace can be logged again.
os.environ.setdefault("MLFLOW_ENABLE_ASYNC_TRACE_LOGGING", "false")
# Set even if the user chose otherwise: a silently truncated parameter is a lost parameter.
os.environ["MLFLOW_TRUNCATE_LONG_VALUES"] = "false"

import hashlib
import logging
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import mlflow
import requests
import sqlalchemy
import sqlalchemy.exc
import tenacity
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException, RestException
from mlflow.store.entities import PagedList
from sqlalchemy.engine import make_url

from grpo_tasks.kit.lock import file_lock, private_folder
from grpo_tasks.tracking.database import lock_file, make_ready, sqlite_file
from schemas.config.operations import TrackingConfig
from schemas.config.types import why_no_store
from schemas.errors import StoreAwayError, TrackingError, disk_full

DEFAULT_URI = "sqlite:///mlflow.db"
FIRST_S = 6.0
"""Longest patience in seconds with a store that was never reached before, so that a wrong address fails soon."""
CHECK_S = 4.0
"""The same where nothing else is waiting for the store."""
LAST_S = 2
"""Longest wait in seconds for one answer, when an interrupt has ended the work and only its end is left to be recorded."""
T = TypeVar("T")

FAULTS = (MlflowException, requests.RequestException, sqlalchemy.exc.SQLAlchemyError)
_TEMPORARY_CODES = {"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED"}
# Of SQLite, PostgreSQL, MySQL and MLflow about a row or table that another process created in the meantime.
_CONFLICT = re.compile(
    "UNIQUE constraint failed|duplicate key value|Duplicate entry|UniqueViolation|RESOURCE_ALREADY_EXISTS|already exists", re.I
)
_MAX_CONFLICTS = 8
_DELETED_RUN = re.compile("The run ([0-9a-f]{32}) must be in the 'active'")
_NOT_MLFLOW = re.compile("not in a valid JSON format|failed with error code (?:30.|404|405|501) ")
_SELECTS = "tracking.tracking_uri or MLFLOW_TRACKING_URI selects the MLflow server: http://HOST:PORT"
_TIMEOUT, _RETRIES = "MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"
_answered: set[str] = set()

for _chatty in ("mlflow", "alembic"):
    logging.getLogger(_chatty).setLevel(logging.ERROR)
# It logs a full disk with every frame, for each request, and raises it too.
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Store:
    """An MLflow tracking store with its registry."""

    uri: str
    client: MlflowClient
    patience_s: float = FIRST_S
    """Longest time in seconds that `call` retries once the store has answered this process; before, `FIRST_S` at most."""

    def call(self, request: Callable[[MlflowClient], T]) -> T:
        """Run a repeatable request; retry it while the store is unreachable or another process created the same row first."""
        try:
            with at_the_end() as ending:
                patience_s = self.patience_s if self.uri in _answered else min(self.patience_s, FIRST_S)
                answer = _attempts(LAST_S if ending else patience_s)(request, self.client)
        except FAULTS as fault:
            raise self.error(fault) from fault
        _answered.add(self.uri)
        return answer

    def lock(self, what: str, *, who: str) -> AbstractContextManager[None]:
        """This machine's lock on an operation; `who` is shown to those who wait. Read the store inside: it may have changed."""
        waiting = partial(_log.warning, "waiting for the lock %s, which %s holds", what)
        return file_lock(_lock_of(self.uri, what), holder=who, on_wait=waiting)

    def error(self, fault: Exception) -> TrackingError:
        """The fault as an error that tells the user what to do."""
        said = reason_of(fault)
        not_mlflow = "error_code" not in fault.json if isinstance(fault, RestException) else _NOT_MLFLOW.search(said)
        if found := _DELETED_RUN.search(said):
            return deleted_run(found[1], self.uri)
        if disk_full(fault):
            fix = "free some disk space, then run the same command: it resumes"
        elif "No such artifact" in said:
            fix = "its files are not where MLflow has left them: put them back, or run its config again, which uploads them"
        elif isinstance(fault, MlflowException) and fault.error_code in ("UNAUTHENTICATED", "PERMISSION_DENIED"):
            fix = "export MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
        elif not_mlflow:
            said = f"the server at this address is not MLflow, or a page to sign in is in front of it: {said}"
            fix = f"{_SELECTS}; export MLFLOW_TRACKING_TOKEN, or a login, for a page to sign in"
        elif is_temporary(fault):
            fix = "start the server or set tracking.tracking_uri, then run the same command: it resumes"
            return StoreAwayError(said, place=self.uri, fix=fix)
        else:
            fix = f"see the message; {_SELECTS}"
        return TrackingError(said, place=self.uri, fix=fix)

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """Make this the store of mlflow's global functions inside the block. Model logging and downloads have no other way."""
        before = mlflow.get_tracking_uri()
        # set_tracking_uri leaves its argument in the environment, where it would look like the user's own choice.
        with _environment({"MLFLOW_TRACKING_URI": self.uri}):
            mlflow.set_tracking_uri(self.uri)
            try:
                yield
            finally:
                mlflow.set_tracking_uri(before)

    def call_globally(self, request: Callable[[MlflowClient], T]) -> T:
        """`call` while this is the store of mlflow's global functions."""
        with self.as_default():
            return self.call(request)

    def download(self, run_id: str, path: str, folder: Path) -> Path | None:
        """An artifact of a run in `folder`; None when the run has none of this name."""
        siblings = self.call(lambda client: client.list_artifacts(run_id, path.rpartition("/")[0] or None))
        if path not in {item.path for item in siblings}:
            return None
        load = partial(mlflow.artifacts.download_artifacts, run_id=run_id, artifact_path=path, dst_path=str(folder))
        return Path(self.call_globally(lambda _: load()))

    def read(self, run_id: str, path: str) -> str | None:
        """The text of an artifact of a run; None when the run has none of this name."""
        with tempfile.TemporaryDirectory() as folder:
            found = self.download(run_id, path, Path(folder))
            return None if found is None else found.read_text(encoding="utf-8")


def pages(search: Callable[[str | None], PagedList[T]]) -> Iterator[T]:
    """Everything that a search of MLflow's finds; one answer holds only the first rows. `search` gets the token of a page."""
    token: str | None = None
    while True:
        found = search(token)
        yield from found
        token = found.token
        if not token:
            return


def versions_of(client: MlflowClient, name: str) -> list[ModelVersion]:
    """The versions of a registered model; none where there is no such model."""
    if not set(name) & set("'\\"):
        return list(client.search_model_versions(f"name = '{name}'"))
    # Somebody else's model, or a typing error: a filter has no way to write such a name.
    found = pages(lambda token: client.search_model_versions(page_token=token))
    return [version for version in found if version.name == name]


def or_none(call: Callable[[], T]) -> T | None:
    """What a call returns; None where MLflow says that there is no such run, model, version or alias."""
    try:
        return call()
    except MlflowException as fault:
        if fault.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
            return None
        raise


def run_or_none(client: MlflowClient, run_id: str) -> Run | None:
    """The run; None when it was removed for good."""
    return or_none(lambda: client.get_run(run_id))


def is_temporary(fault: BaseException) -> bool:
    """Whether a retry may succeed: no connection, an overloaded server, a locked database."""
    if disk_full(fault):
        return False
    if isinstance(fault, MlflowException):
        return fault.error_code in _TEMPORARY_CODES
    return isinstance(fault, requests.RequestException | sqlalchemy.exc.OperationalError)


def is_conflict(fault: BaseException) -> bool:
    """Whether the store refused a row that another process wrote at the same moment. A retry finds that row."""
    return isinstance(fault, FAULTS) and bool(_CONFLICT.search(str(fault)))


def reason_of(fault: BaseException) -> str:
    """The whole reason that a library gives, without the statements that SQLAlchemy quotes."""
    lines = [line.rstrip() for line in str(fault).strip().splitlines()]
    quoted = ("(raised as a result of", "[SQL:", "[parameters:", "(Background on this error")
    return "\n".join(line for line in lines if line and not line.startswith(quoted)) or type(fault).__name__


def deleted_run(run_id: str, uri: str) -> TrackingError:
    """The error of a run that somebody has deleted while it ran."""
    return TrackingError(
        f"the run {run_id} was deleted in MLflow",
        place=uri,
        fix=f"start it again: that makes a new run in MLflow from what is finished; or mlflow runs restore --run-id {run_id}",
    )


@contextmanager
def at_the_end() -> Iterator[bool]:
    """Whether the caller cleans up after an interrupt; then a server that takes a request and says nothing is not waited for."""
    error = sys.exc_info()[1]
    ending = error is not None and not isinstance(error, Exception)
    with _environment({_TIMEOUT: str(LAST_S), _RETRIES: "0"} if ending else {}):
        yield ending


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables, which MLflow reads before each request, within the block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _attempts(patience_s: float | None) -> tenacity.Retrying:
    """Attempts at a call: `_MAX_CONFLICTS` on conflicts; for `patience_s` seconds (None: once) while the store is unreachable."""

    def stop(state: tenacity.RetryCallState) -> bool:
        fault = state.outcome.exception() if state.outcome else None
        if fault is not None and is_conflict(fault):
            return state.attempt_number >= _MAX_CONFLICTS
        return patience_s is None or (state.seconds_since_start or 0.0) >= patience_s

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda fault: is_temporary(fault) or is_conflict(fault)),
        stop=stop,
        # The random part keeps processes that conflicted from retrying at the same moment.
        wait=tenacity.wait_exponential(multiplier=0.2, max=4.0) + tenacity.wait_random(0, 0.1),
        reraise=True,
    )


def _lock_of(uri: str, what: str) -> Path:
    """The lock file: next to an SQLite file, for any other store in the machine's temporary folder."""

    def short(text: str) -> str:
        return hashlib.sha256(text.encode()).hexdigest()[:8]

    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", what)[:100] + "-" + short(what)
    file = sqlite_file(uri)
    if file is not None:
        return lock_file(file, plain)
    return private_folder(Path(tempfile.gettempdir()) / f"grpo-locks-{os.geteuid()}") / f"{short(uri)}-{plain}"


def resolve_uri(tracking: TrackingConfig) -> str:
    """The config's tracking_uri, else MLFLOW_TRACKING_URI, else a database in the working directory."""
    return tracking.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def open_store(tracking: TrackingConfig, *, known: bool = False) -> Store:
    """The store that a configuration names. `known`: the process that started this one has reached it."""
    store = connect(resolve_uri(tracking))
    if known:
        _answered.add(store.uri)
    return replace(store, patience_s=tracking.patience_s)


def check_store(tracking: TrackingConfig) -> int:
    """Number of experiments in the store, known within seconds: before hours of work, and before other servers are started."""
    store = replace(open_store(tracking), patience_s=CHECK_S)
    # A server that takes the connection and says nothing would hold each request for a minute.
    with _environment({_TIMEOUT: str(round(CHECK_S))}):
        return len(store.call(lambda client: list(pages(lambda token: client.search_experiments(page_token=token)))))


def connect(uri: str) -> Store:
    """The store behind an address. An SQLite file is created or migrated first, completely or not at all.

    MLflow keeps its stores by their address: in a process that changes its directory, a relative one would stay the first file.
    """
    if reason := why_no_store(uri):
        # That of a config was checked with it.
        raise TrackingError(f"{uri!r} is {reason}", place="MLFLOW_TRACKING_URI")
    if file := sqlite_file(uri):
        uri = make_url(uri).set(database=str(file)).render_as_string(hide_password=False)
    try:
        prepare(uri)
        if not uri.startswith(("http", "sqlite")):
            # MLflow itself would try for two minutes.
            engine = sqlalchemy.create_engine(uri)
            _attempts(CHECK_S)(lambda: engine.connect().close())
            engine.dispose()
        return Store(uri=uri, client=_attempts(None)(MlflowClient, tracking_uri=uri))
    except ModuleNotFoundError as fault:
        said, fix = f"the database driver {fault.name} is not installed", f"pip install {fault.name}"
        raise TrackingError(said, place=uri, fix=fix) from fault
    except FAULTS as fault:
        fix = "tracking.tracking_uri: sqlite:///FILE.db, postgresql+psycopg2://..., or http://HOST:PORT"
        raise TrackingError(reason_of(fault), place=uri, fix=fix) from fault


def prepare(uri: str) -> None:
    """Create or migrate an SQLite store before this process or a server opens it. Does nothing for any other store."""
    file = sqlite_file(uri)
    if file is not None:
        make_ready(file)
