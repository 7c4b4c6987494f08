"""What a command prepares before it imports Prefect or MLflow, and how it reports errors.

A short message for what the user can fix, a traceback for a fault of this program. Nothing heavy is imported at the top: `grpo
--help`, a dry run and a refused config must answer at once.
"""

import logging
import os
import re
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

from rich.console import Console
from rich.panel import Panel

from grpo_tasks.processes.lifetime import STOPPING, Signalled, ended_by
from schemas.config.load import PRESETS, configs_in, load_config
from schemas.config.types import why_no_store
from schemas.errors import ConfigError, EndedByOthers, TrackingError, UserError, refused_by_system
from schemas.secret import hide, hide_output

if TYPE_CHECKING:
    from schemas.config.run import RunConfig

READS = "MLflow cannot be read"
"""Title of an error of MLflow in a command that only reads."""
INTERRUPTED = 130
EXIT_S = 4.0
"""Longest wait for the threads of an interrupted command."""
_STEP = re.compile(r"step-([0-9]+)")
RETRIES = "PREFECT_CLIENT_MAX_RETRIES"
MANY, FEW = "8", "4"
"""How often the client repeats a request to Prefect, after 2, 4, 8 ... seconds."""
LOG_FORMAT, LOG_TIME = "%(asctime)s | %(levelname)-7s | %(message)s", "%H:%M:%S"
DEFAULTS = {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    # If a server disappears during a run, the client retries for up to eight minutes with doubling intervals.
    RETRIES: MANY,
    "PREFECT_CLIENT_RETRY_EXTRA_CODES": "500",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    # Without this, MLflow prints where its run is after each use, into the middle of our output.
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    # Without the name of the flow run or task run: a line of the log fits in a terminal.
    **dict.fromkeys(
        ("PREFECT_LOGGING_FORMATTERS_STANDARD_FLOW_RUN_FMT", "PREFECT_LOGGING_FORMATTERS_STANDARD_TASK_RUN_FMT"), LOG_FORMAT
    ),
    "PREFECT_LOGGING_FORMATTERS_STANDARD_DATEFMT": LOG_TIME,
}
"""Environment variables set for every command, unless the user has set them."""


def named_config(source: str | None) -> str:
    """The config that the user named; raises `ConfigError` with suggestions when there is none."""
    if source is not None:
        return source
    presets = ", ".join(sorted(path.stem for path in PRESETS.glob("*.yaml")))
    here = configs_in(Path())
    fix = f"grpo run {here[0]}" if here else "grpo run demo, or write a config for your data: grpo init FILE"
    raise ConfigError(f"no config is named; configs here: {', '.join(here) or 'none'}; presets: {presets}", fix=fix)


def checked_config(source: str, override: list[str] | None) -> "RunConfig":
    """Load the config and check that its inputs exist, before Prefect takes seconds to start."""
    from flows.preflight import check_columns, check_inputs

    settings = load_config(source, override)
    check_inputs(settings)
    check_columns(settings)
    return settings


def prepare_environment(*, servers: bool = True) -> None:
    """Set `DEFAULTS`, keep secrets out of logs and output, and check addresses and the working directory.

    `servers` also selects the MLflow server that `grpo up` started in this folder, if mlflow.db is not what it uses.
    """
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    hide_output()
    # On some CPUs bitsandbytes says when it is imported that it misses a package. Nothing here needs it.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    # What follows from it is said by `check_database`, where it matters.
    warnings.filterwarnings("ignore", "Failed to create the Prefect home directory")
    if (uri := os.environ.get("MLFLOW_TRACKING_URI")) and (reason := why_no_store(uri)):
        raise ConfigError(f"{uri!r} is {reason}", place="MLFLOW_TRACKING_URI")
    if (address := os.environ.get("PREFECT_API_URL")) is not None and (why := _why_no_address(address)):
        fix = "correct it, or unset PREFECT_API_URL"
        raise ConfigError(f"{address!r} is not an address: {why}", place="PREFECT_API_URL", fix=fix)
    try:
        Path.cwd()
    except OSError as error:
        raise UserError("the working directory no longer exists", fix="change to a folder that does") from error
    if servers:
        _use_own_mlflow()
    for name in ("prefect.flow_runs", "prefect.task_runs"):
        logging.getLogger(name).addFilter(_point_to_the_end)
        logging.getLogger(name).addFilter(_hide_secrets)
        logging.getLogger(name).addFilter(_drop_signals)
    for name in ("prefect", "prefect.flow_runs"):
        logging.getLogger(name).addFilter(_drop_notices)


def prepare_step(config: "RunConfig", *, device: bool) -> bool:
    """Prepare a command for one step. True: a flow must run it, after `prepare_flow`. False: it runs in this process.

    Without a server, a flow would start a temporary one, which takes longer than the step. The step's folder decides what is
    finished, and MLflow records it, with or without a flow. A GPU slot, though, is Prefect's: it is how two commands take turns.
    """
    from grpo_tasks.processes.child import prepare_child
    from grpo_tasks.running.orchestrator import slots_of

    prepare_environment()
    if device:
        prepare_child()
    if (device and slots_of(config.resources)) or _names_server():
        prepare_flow()
        return True
    # What the steps log goes to stderr, as Prefect's log does.
    log, handler = logging.getLogger("grpo"), logging.StreamHandler()
    handler.setFormatter(logging.Formatter(LOG_FORMAT, datefmt=LOG_TIME))
    handler.addFilter(_hide_secrets)
    if not log.handlers:
        log.addHandler(handler)
    log.setLevel(logging.INFO)
    log.propagate = False
    return False


def _names_server() -> bool:
    """Whether the environment, a profile or a settings file names a Prefect server. Asks Prefect only where one of them may."""
    if "PREFECT_API_URL" in os.environ:
        return True
    home = Path(os.environ.get("PREFECT_HOME", "~/.prefect")).expanduser()
    profiles = Path(os.environ.get("PREFECT_PROFILES_PATH", home / "profiles.toml")).expanduser()
    places = {profiles: "PREFECT_API_URL", Path(".env"): "PREFECT_API_URL", Path("prefect.toml"): "api"}
    places[Path("pyproject.toml")] = "tool.prefect"
    for path, word in places.items():
        with suppress(OSError):
            if word in path.read_text(encoding="utf-8", errors="replace"):
                from flows.temporary_server import is_temporary

                return not is_temporary()
    return False


def prepare_flow() -> None:
    """`prepare_environment`, then check that the configured Prefect server answers, or lock the temporary one."""
    prepare_environment()
    from flows.temporary_server import check_database, lock_temporary_server
    from grpo_tasks.running.prefect_server import configured_server

    server = configured_server()
    if server is not None:
        # The long retries are for a server that disappears during a run, not for one that was never there.
        server.count_runs()
        return
    check_database()
    if os.environ[RETRIES] == MANY:
        # Nobody restarts a temporary server, so there is no point in waiting long for it.
        os.environ[RETRIES] = FEW
    lock_temporary_server()


def _why_no_address(address: str) -> str:
    try:
        if urlsplit(address).scheme in ("http", "https") and address.isprintable():
            return ""
    except ValueError as error:
        return str(error)
    return "it begins with none of http://, https://" if address.strip() else "it is empty"


def _use_own_mlflow() -> None:
    """Where this folder's servers keep their tables in PostgreSQL, mlflow.db would be a second, empty store: use the server."""
    if os.environ.get("MLFLOW_TRACKING_URI") or not Path(".grpo/stack.json").exists():
        return
    from grpo_tasks.operating.servers import MLFLOW, Stack

    stack = Stack(Path.cwd())
    if MLFLOW in stack.running() and (at := stack.addresses()).postgres:
        os.environ["MLFLOW_TRACKING_URI"] = at.mlflow


def _point_to_the_end(record: logging.LogRecord) -> bool:
    """Prefect logs an error of a task, of its flow and as their final states. The command itself shows it once, with its fix."""
    error = record.exc_info[1] if record.exc_info else None
    refused = error if isinstance(error, UserError) else refused_by_system(error)
    if refused is not None:
        record.exc_info = record.exc_text = None
        record.msg, record.args = f"failed: {refused.title} (see the message at the end)", None
    elif record.getMessage().startswith("Finished in state Failed("):
        record.msg, record.args = "Finished in state Failed", None
    return True


def _drop_notices(record: logging.LogRecord) -> bool:
    # What the command itself says, or nobody asked for: the lines of the run and of its server in the background.
    notices = ("Starting temporary server", "Stopping temporary server", "Beginning flow run", "Finished in state Completed(")
    return not record.getMessage().startswith(notices)


def _drop_signals(record: logging.LogRecord) -> bool:
    # The command says that it stops, and that it has stopped.
    message = record.getMessage()
    return not ("Execution was aborted by a" in message and message.startswith(("Crash detected!", "Finished in state Crashed(")))


def _hide_secrets(record: logging.LogRecord) -> bool:
    message = record.getMessage()
    if (hidden := hide(message)) != message:
        record.msg, record.args = hidden, None
    return True


@dataclass(slots=True)
class Command:
    """What is known about a command when it is interrupted."""

    folder: Path | None = None
    """Folder of the run; None for a command that leaves nothing to continue from."""


@contextmanager
def report_errors(*, reads: bool = False) -> Iterator[Command]:
    """Show a `UserError` as a panel on stderr and exit with its code; let every other exception through with its traceback.

    Ctrl-C exits with code 130 and says from where the same command continues. SIGTERM and SIGHUP say the same.

    Args:
        reads: the command records nothing, so no title may say that it could not.
    """
    command = Command()
    try:
        with ended_by(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, said=STOPPING):
            yield command
    except UserError as error:
        _show_and_exit(error, READS if reads and isinstance(error, TrackingError) else error.title)
    except OSError as error:
        refused = refused_by_system(error)
        if refused is None:
            raise
        _show_and_exit(refused, refused.title)
    except KeyboardInterrupt as interrupt:
        by = f"{interrupt}: " if isinstance(interrupt, EndedByOthers) else ""
        Console(stderr=True, highlight=False, markup=False).print(by + stopped_message(command.folder), soft_wrap=True)
        if isinstance(interrupt, Signalled):
            if interrupt.number != signal.SIGINT:
                interrupt.end_process()

            # Everything is released by now; what is left are threads, and those may wait for a server that does not answer.
            def end() -> None:
                threading.main_thread().join()
                time.sleep(EXIT_S)
                os._exit(INTERRUPTED)

            threading.Thread(target=end, daemon=True).start()
        sys.exit(INTERRUPTED)


def stopped_message(folder: Path | None) -> str:
    """What Ctrl-C leaves: the update from which the same command continues the stage that it was training."""
    if folder is None or not folder.is_dir():
        return "stopped"
    unfinished = [stage for stage in folder.glob("train_stage/*") if stage.is_dir() and not (stage / "result.json").exists()]
    newest = max(unfinished, key=lambda stage: stage.stat().st_mtime_ns, default=None)
    if newest is None:
        return "stopped; the same command continues with the first step that is not finished"
    name = newest.name.rpartition("-")[0]
    steps = [int(found[1]) for path in newest.glob("checkpoints/*") if (found := _STEP.fullmatch(path.name))]
    if not steps:
        return f"stopped; the same command starts stage {name} again, because it had no checkpoint yet"
    return f"stopped; the same command continues from update {max(steps) + 1} of stage {name}"


def _show_and_exit(error: UserError, title: str) -> NoReturn:
    panel = Panel(str(error), title=title, border_style="red", title_align="left")
    Console(stderr=True, highlight=False, markup=False).print(panel)
    sys.exit(error.exit_code)
