"""Sends the journal of a stage to TensorBoard and to Weights & Biases (`tracking.report_to`), in addition to MLflow.

    metrics.jsonl --> Report --> runs/NAME/tensorboard/STAGE-KEY-TIME/
                           \\--> runs/NAME/wandb/offline-run-TIME-STAGE-KEY-TIME/

The journal has every update, so nothing depends on what an interrupted process has sent: the next one writes the stage from its
first update, in place of the unfinished files (wandb's server ignores updates that it has). What was sent completely is noted in
runs/NAME/.reported and not sent again. wandb stays offline unless WANDB_MODE says otherwise; `wandb sync` uploads its folders.
"""

import logging
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from grpo_tasks.kit.lock import file_lock
from grpo_tasks.stage.journal import JOURNAL_KEYS, JsonLinesTail
from grpo_tasks.stage.stage_dir import StageDir
from schemas.config.operations import TrackingConfig
from schemas.errors import ConfigError, StoreAwayError

NOTES = ".reported"
"""Folder in that of the run: for each stage and tracker the last update that was sent."""
_log = logging.getLogger(__name__)


class Writer(Protocol):
    """One stage as one run of a tracker."""

    def add(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """The figures of an update, with the time in seconds at which it was made."""

    def flush(self) -> None:
        """Show what was added."""

    def close(self) -> None:
        """End the run; everything is sent when this returns."""


class TensorBoardWriter:
    """A folder of event files. One that an interrupted process left is replaced."""

    def __init__(self, folder: Path) -> None:
        from tensorboard.summary import Writer as EventWriter

        shutil.rmtree(folder, ignore_errors=True)
        self._events = EventWriter(str(folder))

    def add(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """One event for each figure."""
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step, wall_time=time_s)

    def flush(self) -> None:
        """Write to disk."""
        self._events.flush()

    def close(self) -> None:
        """Write to disk and close the file."""
        self._events.close()


class WandbWriter:
    """A run of wandb, offline unless WANDB_MODE says otherwise; its id is `name`, so a resumed stage continues the same run.

    What wandb would collect by itself stays out: output, command line, packages, and figures of the machine, which MLflow has.
    """

    def __init__(self, folder: Path, name: str, *, project: str, group: str, params: Mapping[str, str]) -> None:
        import wandb

        for unfinished in folder.glob(f"offline-run-*-{name}"):
            shutil.rmtree(unfinished)
        quiet = wandb.Settings(console="off", silent=True, x_disable_stats=True, x_disable_meta=True, x_save_requirements=False)
        named: dict[str, Any] = {"project": os.environ.get("WANDB_PROJECT", project), "group": group, "id": name, "name": name}
        resumed: dict[str, Any] = {"resume": "allow", "reinit": "create_new", "mode": wandb_mode()}
        try:
            # It makes a folder `wandb` in the one that it is given.
            self._run = wandb.init(dir=folder.parent, config=dict(params), settings=quiet, **named, **resumed)
        except wandb.errors.Error as error:
            raise StoreAwayError(f"wandb: {error}", fix="check the connection, or unset WANDB_MODE to stay offline") from error

    def add(self, step: int, time_s: float, metrics: Mapping[str, float]) -> None:
        """One row of the history; an update that wandb's server has already is left out."""
        if not self._run.resumed or step >= self._run.step:
            self._run.log({**metrics, "_timestamp": time_s}, step=step, commit=True)

    def flush(self) -> None:
        """wandb writes by itself."""

    def close(self) -> None:
        """Wait until everything is written, or uploaded."""
        import wandb

        self._run.finish(exit_code=0)
        # Its service holds the id of a run for as long as it lives.
        wandb.teardown(exit_code=0)


def wandb_mode() -> Any:
    """The user's choice, else offline: nothing leaves the machine unasked."""
    return os.environ.get("WANDB_MODE") or "offline"


def check_reports(tracking: TrackingConfig) -> None:
    """Refuse a run whose tracker would ask for a login in the middle of it; only wandb does, and only online."""
    if "wandb" not in tracking.report_to or wandb_mode() != "online":
        return
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    try:
        refused = "" if wandb.login(prompt=False) else "nobody is logged in"
    except wandb.errors.Error as error:
        refused = str(error)
    if refused:
        raise ConfigError(f"wandb: {refused}", place="WANDB_MODE=online", fix="wandb login, or unset WANDB_MODE to stay offline")


@dataclass(slots=True)
class Report:
    """What one tracker gets of one stage. Any process can create a new one at any time."""

    tracker: str
    output: Path
    """Folder of the run."""
    stage_dir: Path
    open_writer: Callable[[str], Writer]
    """Opens the run of this name. `StoreAwayError` when the tracker cannot be reached now."""
    _tail: JsonLinesTail = field(init=False)
    _lines: list[dict[str, Any]] = field(init=False)
    """Lines that wait for the writer to be opened."""
    _first_s: float = field(init=False)
    _last_step: int = field(init=False)
    _writer: Writer | None = field(init=False)
    _held: ExitStack = field(init=False)

    def __post_init__(self) -> None:
        self._tail = JsonLinesTail(StageDir(self.stage_dir).journal, JOURNAL_KEYS | {"timestamp_ms": int})
        self._lines, self._last_step, self._first_s, self._writer, self._held = [], 0, 0.0, None, ExitStack()

    def ship(self) -> None:
        """Send the complete lines written since the last call. A tracker that is away is only a delay, with a warning."""
        grown = False
        for line in self._tail.read():
            # Of two lines of one update the first counts.
            if line["step"] > self._last_step:
                self._first_s = self._first_s or line["timestamp_ms"] / 1000
                self._last_step, grown = line["step"], True
                self._lines.append(line)
        if not (grown and self._opened()):
            return
        assert self._writer is not None
        for line in self._lines:
            known = {name: float(value) for name, value in line["metrics"].items() if value is not None}
            self._writer.add(line["step"], line["timestamp_ms"] / 1000, known)
        self._lines.clear()
        self._writer.flush()

    def close(self) -> None:
        """End the run of the tracker, and note that everything was sent. A later `ship` starts again."""
        if self._writer is not None:
            self._writer.close()
            self._note.write_text(str(self._last_step), encoding="utf-8")
        self._held.close()
        self.__post_init__()

    @property
    def _name(self) -> str:
        # A stage that is trained again under the same key is another run.
        return f"{self.stage_dir.name}-{datetime.fromtimestamp(self._first_s, UTC):%Y%m%d-%H%M%S}"

    @property
    def _note(self) -> Path:
        return self.output / NOTES / f"{self.tracker}-{self._name}"

    def _opened(self) -> bool:
        """Whether the writer is open; it stays closed when an earlier process has sent the same updates."""
        if self._writer is not None:
            return True
        self._held.enter_context(file_lock(self._note.with_name(f"{self._note.name}.lock"), holder="another run"))
        try:
            if self._note.exists() and self._note.read_text(encoding="utf-8") == str(self._last_step):
                self._held.close()
                return False
            self._note.unlink(missing_ok=True)
            self._writer = self.open_writer(self._name)
        except StoreAwayError as error:
            self._held.close()
            _log.warning("%s; %d lines of the journal wait", error.message, len(self._lines))
        return self._writer is not None
