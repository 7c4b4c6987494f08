"""Follows a growing file of JSON lines, such as a stage's journal or its events. It never writes to the file."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_tasks.stage.journal import read_lines


@dataclass(slots=True)
class JsonLinesTail:
    """Reads each complete line of the file once."""

    path: Path
    keys: Mapping[str, type]
    """Keys that every line must have, and the types of their values."""
    _offset: int = 0

    def read(self) -> list[dict[str, Any]]:
        """The complete lines written since the last call; none while there is no file.

        A file that is shorter than at the last call is another one, because the stage started again. It is read from its start.

        Raises:
            TrainingError: a complete line is damaged, or the file cannot be read.
        """
        if self.path.exists() and self.path.stat().st_size < self._offset:
            self._offset = 0
        lines, self._offset = read_lines(self.path, self.keys, self._offset)
        return lines
