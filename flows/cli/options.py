"""Arguments and options that several commands share."""

import re
from typing import Annotated

import typer

from schemas.errors import ConfigError
from schemas.secret import has_password

Config = Annotated[
    str, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a preset (`grpo presets` lists them).")
]
OptionalConfig = Annotated[
    str | None, typer.Argument(metavar="CONFIG", help="A YAML file, or the name of a preset. Without it, grpo lists those here.")
]
MODEL_HELP = "NAME, NAME@ALIAS or NAME/VERSION of a registered model, a model folder, or a hub id."
ADAPTER_HELP = "A folder with adapter_config.json, a hub id, or NAME, NAME@ALIAS or NAME/VERSION: the adapter of that version."
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override a field, for example stages.0.learning_rate=1e-5. Repeatable."),
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Run every step again, even if its inputs have not changed.")]
Wide = Annotated[bool, typer.Option("--wide", help="Show every column of a table, however narrow the terminal is.")]
Registered = Annotated[
    str, typer.Argument(metavar="MODEL", help="NAME@ALIAS, NAME/VERSION, or NAME for the champion of that name.")
]


def _refuse_password(address: str | None) -> str | None:
    # Prefect records this parameter, and every user of the machine can read the command line of a process.
    if address and has_password(address):
        raise typer.BadParameter(
            "it contains a password; export MLFLOW_TRACKING_URI, or MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
        )
    return address


TrackingUri = Annotated[
    str | None,
    typer.Option(
        "--tracking-uri",
        callback=_refuse_password,
        help="Address of MLflow. Default: MLFLOW_TRACKING_URI. If that is not set: the server that grpo up started in this "
        "folder on PostgreSQL, else sqlite:///mlflow.db.",
    ),
]
PrefectPort = Annotated[
    int, typer.Option(help="Port of the Prefect UI. If it is in use, the next free port is taken.", min=1, max=65535)
]
MlflowPort = Annotated[
    int, typer.Option(help="Port of the MLflow UI. If it is in use, the next free port is taken.", min=1, max=65535)
]
Workers = Annotated[
    int, typer.Option(help="Number of worker processes. They execute the runs started in the UI.", min=1, max=256)
]
Postgres = Annotated[
    str | None,
    typer.Option(
        envvar="GRPO_POSTGRES",
        metavar="URL",
        help="Keep both databases in PostgreSQL instead of SQLite: postgresql://USER:PASSWORD@HOST:PORT.",
    ),
]
SIZE_UNITS = {"gb": 1e9, "gib": 2.0**30, "mb": 1e6, "mib": 2.0**20}


def parse_size(text: str) -> float:
    """Bytes of a size such as 24GB or 80GiB; `ConfigError` where it is none."""
    found = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,3})?)\s*([a-zA-Z]{2,3})\s*", text)
    if found is None or found[2].lower() not in SIZE_UNITS or not float(found[1]):
        raise ConfigError(f"{text[:40]!r} is not a size of memory", place="--memory", fix="a number with a unit, such as 24GB")
    return float(found[1]) * SIZE_UNITS[found[2].lower()]


AGE_UNITS = {"m": 60.0, "h": 3_600.0, "d": 86_400.0, "w": 604_800.0}


def parse_age(text: str) -> float:
    """Seconds of an age such as 30d or 12h; `ConfigError` where it is none."""
    found = re.fullmatch(r"\s*(\d{1,6}(?:\.\d{1,3})?)\s*([mhdw])\s*", text)
    if found is None:
        raise ConfigError(f"{text[:40]!r} is not an age", place="--older-than", fix="a number with m, h, d or w, such as 30d")
    return float(found[1]) * AGE_UNITS[found[2]]
