"""Which columns the rows of a source have: a source that has none of the configured ones is an error about the whole of it."""

import difflib
from dataclasses import dataclass, field

from grpo_tasks.data.records import Columns, Record
from schemas.errors import DataError


@dataclass(slots=True)
class Seen:
    """Counted over the rows of a source, or of a part of it."""

    rows: int = 0
    readable: int = 0
    with_prompt: int = 0
    with_answer: int = 0
    columns: list[str] = field(default_factory=list)
    """Of the first row that can be read."""

    def note(self, record: Record, columns: Columns) -> None:
        """Count one row."""
        self.rows += 1
        if record.fields is None:
            return
        if not self.readable:
            self.columns = list(dict.fromkeys(str(key) for key in record.fields))
        self.readable += 1
        self.with_prompt += columns.prompt in record.fields or columns.question in record.fields
        self.with_answer += columns.answer in record.fields

    def add(self, later: "Seen") -> None:
        """Count the rows of the part after this one."""
        self.columns = self.columns if self.readable else later.columns
        self.rows += later.rows
        self.readable += later.readable
        self.with_prompt += later.with_prompt
        self.with_answer += later.with_answer

    def check(self, place: str, columns: Columns) -> None:
        """Raise `DataError` when the source has no rows, none that can be read, or none with a prompt or an answer."""
        if not self.rows:
            raise DataError("the source holds no rows", place=place, fix="give it rows or take it out of the config")
        if not self.readable:
            raise DataError("no line of the file can be read", place=place, fix="check the file, or set the source's format")
        if not self.with_prompt:
            raise self._missing(place, question=columns.question, prompt=columns.prompt)
        if not self.with_answer:
            raise self._missing(place, answer=columns.answer)

    def _missing(self, place: str, **wanted: str) -> DataError:
        lower = {name.lower(): name for name in self.columns}
        near = [lower[hit] for name in wanted.values() for hit in difflib.get_close_matches(name.lower(), lower, n=1)]
        setting = f"data.{next(iter(wanted))}_column"
        return DataError(
            f"no row has a column {' or '.join(wanted.values())}; there are: {', '.join(self.columns)}",
            place=place,
            fix=f"set {setting}: {near[0]}" if near else f"set {setting} to one of them",
        )
