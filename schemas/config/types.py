"""Field types and upper bounds that several sections share."""

import math
import os
import re
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints

from schemas.paths import EMBEDDED, is_embedded


def _url(address: str) -> str:
    try:
        urlsplit(address)
    except ValueError as error:
        raise ValueError(f"not a valid address: {error}; fix: http://HOST:PORT") from error
    return address


def why_no_store(address: str) -> str:
    """Why MLflow has no store at this address, and the fix; empty for the address of a server or of a database."""
    if _STORE.match(address):
        return ""
    likely = "http://HOST:PORT, sqlite:///FILE.db or postgresql+psycopg2://..."
    if re.fullmatch(r"[^:]+\.(db|sqlite3?)", address):
        likely = f"sqlite:///{address}"
    elif re.match(r"[\w.-]+:[0-9]+", address):
        likely = f"http://{address}"
    return f"not the address of an MLflow server or database; fix: {likely}"


def _store(address: str) -> str:
    if reason := why_no_store(address):
        raise ValueError(reason)
    return address


def _inside(address: str) -> str:
    if address.startswith(EMBEDDED) and not is_embedded(address):
        raise ValueError(f"{EMBEDDED} names a file or folder that ships with this project; fix: a plain path, without {EMBEDDED}")
    return address


def _registrable(name: str) -> str:
    refused = sorted(set(name) & set("/:@?'\\"))
    if refused or not name.strip() or name in (".", "..") or any(ord(character) < 32 for character in name):
        what = f" with {' '.join(refused)}" if refused else ""
        raise ValueError(f"MLflow cannot find or refuses a name{what}; fix: letters, digits, spaces, and any of - _ .")
    return name


def _portable(name: str) -> str:
    # Folders and files get this name, and they are copied to other machines.
    if name.partition(".")[0].upper() in _DEVICES:
        raise ValueError(f"{name} is the name of a device on Windows, where no file can have it; fix: another name")
    return name


def _outside_of_the_system(folder: Path) -> Path:
    plain = Path(os.path.abspath(folder))  # noqa: PTH100 - resolve() would read the disk
    if len(plain.parts) == 1 or (plain.parts[1] in ("dev", "proc", "sys") and plain.parts[:3] != ("/", "dev", "shm")):
        raise ValueError(f"{folder} belongs to the system; fix: a folder of your own, such as runs")
    return folder


_STORE = re.compile(r"(https?|(sqlite|postgresql|mysql|mssql)(\+\w+)?)://")
_DEVICES = {"CON", "PRN", "AUX", "NUL", *(f"{port}{number}" for port in ("COM", "LPT") for number in range(10))}
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Address = Annotated[str, StringConstraints(min_length=1, max_length=2_000), AfterValidator(_inside)]
"""A path, a hub id or a URL."""
OutputFolder = Annotated[Path, AfterValidator(_outside_of_the_system)]
Url = Annotated[Address, AfterValidator(_url)]
StoreUrl = Annotated[Url, AfterValidator(_store)]
MlflowName = Annotated[str, StringConstraints(min_length=1, max_length=200), AfterValidator(_registrable)]
"""MLflow refuses other names, or does not find them again, but only when the model is published."""
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$"), AfterValidator(_portable)]
TagName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,31}$")]

# Upper bounds. They are generous to any real run, and far below the values at which a typing error (10**12 updates, bytes instead
# of tokens) fills the memory, overflows a timer or trains for a thousand years.
MOST_UPDATES = 10_000_000  # a year of updates, three seconds each
MOST_COMPLETIONS = 1_000_000  # in one batch, rollout or group
MOST_TOKENS = 10_000_000  # the longest contexts of 2026
MOST_ROWS = 1_000_000_000  # or tokens of a batch
MOST_PROCESSES = 4_096  # or threads
MOST_TIMES = 1_000
LONGEST_S = 1_000_000.0  # eleven days; the timers of the system overflow at 24


def _json_value(value: Any, name: str = "") -> Any:
    # Settings travel to child processes, MLflow and Prefect's form as JSON.
    if isinstance(value, dict):
        for key, item in value.items():
            _json_value(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _json_value(item, f"{name}.{index}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}, not a finite number; fix: leave it out or give a number")
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise ValueError(f"{name} is a {type(value).__name__}, which JSON cannot hold; fix: quote it: '{str(value)[:40]}'")
    return value


FreeSettings = Annotated[dict[str, Any], AfterValidator(_json_value)]
