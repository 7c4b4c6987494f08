"""Where MLflow is, and how it is asked: quietly, again while it cannot be reached, and with errors a user can mend.

    TrackingConfig | MLFLOW_TRACKING_URI | sqlite:///mlflow.db  ->  Store  ->  ask(one repeatable call)

Everything asked here may be asked twice without harm; that is what makes the retries safe. Importing this module imports
mlflow (seconds), so flows import the tracking room when they need it. What it does not do: say what is recorded.
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

import logging
import sqlite3
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

from schemas.config import TrackingConfig
from schemas.errors import TrackingError, disk_full

DEFAULT_URI = "sqlite:///mlflow.db"
T = TypeVar("T")

FAULTS = (MlflowException, requests.RequestException, sqlalchemy.exc.SQLAlchemyError)
_PASSING_CODES = {"INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED", "RESOURCE_EXHAUSTED"}
_LONGEST_WAIT_S = 4.0

for _chatty in ("mlflow", "alembic"):
    logging.getLogger(_chatty).setLevel(logging.ERROR)


@dataclass(frozen=True, slots=True)
class Store:
    """An MLflow tracking store with its registry."""

    uri: str
    client: MlflowClient
    patience_s: float = 6.0
    """Longest time in seconds that `ask` goes on trying."""

    def ask(self, work: Callable[[MlflowClient], T]) -> T:
        """One repeatable piece of work; tried again while the store cannot be reached, `TrackingError` after that."""
        attempts = tenacity.Retrying(
            retry=tenacity.retry_if_exception(passes),
            stop=tenacity.stop_after_delay(self.patience_s),
            wait=tenacity.wait_exponential(multiplier=0.2, max=_LONGEST_WAIT_S),
            reraise=True,
        )
        try:
            return attempts(work, self.client)
        except FAULTS as fault:
            raise self.error(fault) from fault

    def error(self, fault: Exception) -> TrackingError:
        """The fault in the user's words."""
        if disk_full(fault):
            mend = "free some space, then run the same command: it goes on where it stopped"
        elif passes(fault):
            mend = "start the server or set tracking.tracking_uri, then run the same command: it goes on where it stopped"
        else:
            mend = "see the message; tracking.tracking_uri or MLFLOW_TRACKING_URI say where MLflow is"
        return TrackingError(str(fault).strip().splitlines()[0][:500], place=self.uri, mend=mend)

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


def resolve_uri(tracking: TrackingConfig) -> str:
    """The config's tracking uri, else the environment's, else a database in the working directory."""
    return tracking.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or DEFAULT_URI


def open_store(tracking: TrackingConfig) -> Store:
    """The store a configuration names.

    Raises:
        TrackingError: the uri is of no kind that mlflow knows, or its database cannot be opened.
    """
    uri = resolve_uri(tracking)
    _check_database_file(uri)
    try:
        return Store(uri=uri, client=MlflowClient(tracking_uri=uri))
    except ModuleNotFoundError as fault:
        raise TrackingError(
            f"the database driver {fault.name} is not installed", place=uri, mend=f"pip install {fault.name}"
        ) from fault
    except FAULTS as fault:
        raise TrackingError(
            str(fault).strip().splitlines()[0][:500],
            place=uri,
            mend="tracking.tracking_uri: sqlite:///FILE.db, postgresql+psycopg2://..., or http://HOST:PORT",
        ) from fault


def _check_database_file(uri: str) -> None:
    """Refuse an SQLite file that cannot be opened at once; mlflow would try for a minute and a half."""
    if not uri.startswith("sqlite:///"):
        return
    file = Path(uri.removeprefix("sqlite:///").partition("?")[0])
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(file)
        try:
            connection.execute("PRAGMA user_version")
        finally:
            connection.close()
    except (OSError, sqlite3.Error) as fault:
        raise TrackingError(
            f"the database cannot be opened: {fault}", place=uri, mend="give a file in a folder you may write to"
        ) from fault
