"""Types and upper bounds that several sections of the config share."""

import math
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints


def _url(address: str) -> str:
    try:
        urlsplit(address)
    except ValueError as error:
        raise ValueError(f"not an address: {error}; fix: http://HOST:PORT") from error
    return address


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Address = Annotated[str, StringConstraints(min_length=1, max_length=2_000)]
"""A path, a hub id or a URL."""
Url = Annotated[Address, AfterValidator(_url)]
MlflowName = Annotated[str, StringConstraints(pattern=r"^[^/:@\x00-\x1f]{1,200}$")]
"""MLflow refuses the other characters and longer names, but only when the model is published."""
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
TagName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,31}$")]

# Upper bounds: generous to any real run, and far below where a slip of the finger (10**12 updates, bytes instead of tokens) fills
# the memory, overflows a timer or trains for a thousand years.
MOST_UPDATES = 10_000_000
"""A year of updates of three seconds."""
MOST_COMPLETIONS = 1_000_000
"""At once, in one batch, round or group."""
MOST_TOKENS = 10_000_000
"""The longest contexts of 2026 hold this many."""
MOST_ROWS = 1_000_000_000
"""Rows of a table, or tokens of a batch."""
MOST_PROCESSES = 4_096
"""Processes or threads on one machine."""
MOST_TIMES = 1_000
"""Repetitions."""
LONGEST_S = 1_000_000.0
"""Eleven days in seconds; the system's own timers overflow at 24."""


def _plain(value: Any, name: str = "") -> Any:
    """Values that JSON has a word for: they travel to other processes, to MLflow and to Prefect's form as JSON."""
    if isinstance(value, dict):
        for key, item in value.items():
            _plain(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _plain(item, f"{name}.{index}")
    elif isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} is {value}, not a finite number; fix: leave it out or give a number")
    elif value is not None and not isinstance(value, str | int | float | bool):
        raise ValueError(f"{name} is a {type(value).__name__}, which JSON has no word for; fix: quote it: '{str(value)[:40]}'")
    return value


FreeSettings = Annotated[dict[str, Any], AfterValidator(_plain)]
"""Settings that somebody else checks."""
