"""Field types and upper bounds that several sections share."""

import math
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, StringConstraints


def _url(address: str) -> str:
    try:
        urlsplit(address)
    except ValueError as error:
        raise ValueError(f"not a valid address: {error}; fix: http://HOST:PORT") from error
    return address


Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Address = Annotated[str, StringConstraints(min_length=1, max_length=2_000)]
"""A path, a hub id or a URL."""
Url = Annotated[Address, AfterValidator(_url)]
MlflowName = Annotated[str, StringConstraints(pattern=r"^[^/:@\x00-\x1f]{1,200}$")]
"""MLflow refuses the other characters and longer names, but only when the model is published."""
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_.-]{0,63}$")]
TagName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,31}$")]

# Upper bounds. They are generous to any real run, and far below the values at which a typing error (10**12 updates, bytes instead
# of tokens) fills the memory, overflows a timer or trains for a thousand years.
MOST_UPDATES = 10_000_000
"""A year of updates, three seconds each."""
MOST_COMPLETIONS = 1_000_000
"""In one batch, rollout or group."""
MOST_TOKENS = 10_000_000
"""The longest contexts of 2026."""
MOST_ROWS = 1_000_000_000
"""Rows of a table, or tokens of a batch."""
MOST_PROCESSES = 4_096
"""Processes or threads on one machine."""
MOST_TIMES = 1_000
"""Repetitions."""
LONGEST_S = 1_000_000.0
"""Eleven days in seconds. The timers of the system overflow at 24 days."""


def _json_value(value: Any, name: str = "") -> Any:
    """Accept values that JSON can hold: settings travel to child processes, MLflow and Prefect's form as JSON."""
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
"""Settings that another library checks."""
