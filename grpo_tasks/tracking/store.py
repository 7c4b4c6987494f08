"""Where MLflow is, and how it is asked: quietly, again while it cannot be reached, and with errors a user can fix.

    TrackingConfig | MLFLOW_TRACKING_URI | sqlite:///mlflow.db  ->  Store  ->  ask(one repeatable call)
                                                                         ->  alone("publish-NAME"): one process of this machine

Everything asked here may be asked twice without harm; that is what makes the retries safe, also those after two processes wrote
the same row at once and the store refused the second. Importing this module imports mlflow (seconds), so flows import the
tracking room when they need it. What it does not do: say what is recorded.
"""

import os

# Read while mlflow is imported; a user who set them keeps them. One retry inside mlflow: ours below are the ones that count, and
# mlflow's default of seven would hold a training stage's follower for minutes when the server is down.
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
os.environ.setdefault("DO_NOT_TRACK", "true")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "60")
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
# Not a default: a parameter cut in silence is a parameter lost.
os.environ["MLFLOW_TRUNCATE_LONG_VALUES"] = "false"

import hashlib
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import mlflow
import requests
import sqlalchemy.exc
import tenacity
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from grpo_tasks.processes.lock import alone
from grpo_tasks.tracking.database import lock_file, make_ready, sqlite_file
from schemas.config.operations import TrackingConfig
from schemas.errors import TrackingError, disk_full

DEFAULT_URI = "sqlite:///mlflow.db"
T = TypeVar("T")

FAULTS = (MlflowException, requests.RequestException, sqlalchemy.exc.SQLAlchemyError)
_PASSING_CODES = {"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED"}
_LONGEST_WAIT_S = 4.0
_OUTRUN = re.compile(
    "UNIQUE constraint failed|duplicate key value|Duplicate entry|UniqueViolation|RESOURCE_ALREADY_EXISTS|already exists", re.I
)
"""What SQLite, PostgreSQL, MySQL and MLflow say of a row or table that somebody else has made meanwhile."""
_RACES = 8
"""Times that a call loses against others before its error is believed."""

for _chatty in ("mlflow", "alembic"):
    logging.getLogger(_chatty).setLevel(logging.ERROR)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Store:
    """An MLflow tracking store with its registry."""

    uri: str
    client: MlflowClient
    patience_s: float = 6.0
    """Longest time in seconds that `ask` goes on trying."""

    def ask(self, work: Callable[[MlflowClient], T]) -> T:
        """One repeatable piece of work; tried again while the store cannot be reached or somebody else was faster.

        Raises:
            TrackingError: it could not be reached for `patience_s` seconds, or refuses.
        """
        try:
            return _attempts(self.patience_s)(work, self.client)
        except FAULTS as fault:
            raise self.error(fault) from fault

    @contextmanager
    def alone(self, what: str, *, who: str) -> Iterator[None]:
        """Be the only process of this machine that does `what` to this store while the block runs.

        Other machines are not excluded: what they change meanwhile shows when the block asks the store, so ask inside. `who` is
        shown to those who wait.
        """

        def waiting(holder: str) -> None:
            _log.warning("waiting for %s, which is at %s", holder, what)

        with alone(_lock_of(self.uri, what), who=who, waiting=waiting):
            yield

    def error(self, fault: Exception) -> TrackingError:
        """The fault in the user's words."""
        if disk_full(fault):
            fix = "free some space, then run the same command: it goes on where it stopped"
        elif passes(fault):
            fix = "start the server or set tracking.tracking_uri, then run the same command: it goes on where it stopped"
        else:
            fix = "see the message; tracking.tracking_uri or MLFLOW_TRACKING_URI say where MLflow is"
        return TrackingError(str(fault).strip().splitlines()[0][:500], place=self.uri, fix=fix)

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """Make this the store of mlflow's global functions for a while (model logging and download have no other way)."""
        before, variable = mlflow.get_tracking_uri(), os.environ.get("MLFLOW_TRACKING_URI")
        mlflow.set_tracking_uri(self.uri)
        try:
            yield
        finally:
            mlflow.set_tracking_uri(before)
            # set_tracking_uri leaves its argument in the environment, where it would pass for the user's own choice.
            os.environ.pop("MLFLOW_TRACKING_URI", None)
            if variable is not None:
                os.environ["MLFLOW_TRACKING_URI"] = variable


def passes(fault: BaseException) -> bool:
    """Whether a fault may be gone the next time: no connection, an overloaded server, a locked database."""
    if disk_full(fault):
        return False
    if isinstance(fault, MlflowException):
        return fault.error_code in _PASSING_CODES
    return isinstance(fault, requests.RequestException | sqlalchemy.exc.OperationalError)


def outrun(fault: BaseException) -> bool:
    """Whether the store refused what somebody else wrote at the same moment; asked again, it finds that."""
    return isinstance(fault, FAULTS) and bool(_OUTRUN.search(str(fault)))


def _attempts(patience_s: float | None) -> tenacity.Retrying:
    """Attempts at a call: `_RACES` while others are faster, `patience_s` seconds (none: one attempt) while the store is away."""

    def stop(state: tenacity.RetryCallState) -> bool:
        fault = state.outcome.exception() if state.outcome else None
        if fault is not None and outrun(fault):
            return state.attempt_number >= _RACES
        return patience_s is None or (state.seconds_since_start or 0.0) >= patience_s

    return tenacity.Retrying(
        retry=tenacity.retry_if_exception(lambda fault: passes(fault) or outrun(fault)),
        stop=stop,
        # Not all at the same moment again.
        wait=tenacity.wait_exponential(multiplier=0.2, max=_LONGEST_WAIT_S) + tenacity.wait_random(0, 0.1),
        reraise=True,
    )


def _lock_of(uri: str, what: str) -> Path:
    """Beside an SQLite file; for any other store among the machine's temporary files."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", what)[:100] + "-" + _digest(what)
    file = sqlite_file(uri)
    if file is not None:
        return lock_file(file, plain)
    return Path(tempfile.gettempdir()) / f"grpo-locks-{os.getuid()}" / f"{_digest(uri)}-{plain}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def resolve_uri(tracking: TrackingConfig) -> str:
    """The config's tracking uri, else the environment's, else a database in the working directory."""
    return tracking.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def open_store(tracking: TrackingConfig) -> Store:
    """The store a configuration names.

    Raises:
        TrackingError: the uri is of no kind that mlflow knows, or its database cannot be opened.
    """
    return connect(resolve_uri(tracking))


def connect(uri: str) -> Store:
    """The store of an address; see `open_store`. An SQLite file is made or migrated first, whole or not at all."""
    try:
        prepare(uri)
        return Store(uri=uri, client=_attempts(None)(MlflowClient, tracking_uri=uri))
    except ModuleNotFoundError as fault:
        raise TrackingError(
            f"the database driver {fault.name} is not installed", place=uri, fix=f"pip install {fault.name}"
        ) from fault
    except FAULTS as fault:
        raise TrackingError(
            str(fault).strip().splitlines()[0][:500],
            place=uri,
            fix="tracking.tracking_uri: sqlite:///FILE.db, postgresql+psycopg2://..., or http://HOST:PORT",
        ) from fault


def prepare(uri: str) -> None:
    """Make an SQLite store ready for whoever opens it next, be it a server; nothing for any other store."""
    file = sqlite_file(uri)
    if file is not None:
        make_ready(file)
