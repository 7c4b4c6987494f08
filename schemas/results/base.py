"""Results that steps hand to each other and leave on disk: frozen, as JSON, never pickled."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict

from schemas.errors import DamagedError


class Result(BaseModel):
    """A frozen record."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def save(self, path: Path) -> None:
        """Write as JSON; a reader never sees an incomplete file."""
        part = path.with_name(path.name + ".part")
        part.write_text(self.model_dump_json(indent=2) + "\n", encoding="utf-8")
        part.replace(path)

    def headline(self) -> str:
        """What came out, in a few words for a list of runs."""
        return ""

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote; `DamagedError` where it is, or holds, the result of a step that changed since."""
        return cls.parse(path.read_bytes(), place=path)

    @classmethod
    def parse(cls, content: bytes, *, place: Path) -> Self:
        """`load` from the bytes of a file that was read already."""
        result = cls.model_validate_json(content)
        for found in step_results(result):
            if found.seal and found.seal != found._digest():
                raise DamagedError("the result changed since its step wrote it (the seal differs)", place=str(place))
        return result


@dataclass(frozen=True, slots=True)
class Section:
    """A part of what a person reads about a result, as Markdown (content/markdown.py), on a page (report.py) or in a terminal
    (flows/cli/show.py). A line break in a cell is kept in a terminal only."""

    title: str = ""
    text: str = ""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    right: Sequence[str] = ()  # columns with numbers
    extra: Sequence[str] = ()
    """Columns that a narrow terminal leaves out, what matters least last."""
    quotes: Mapping[str, str] = field(default_factory=dict)
    """Texts that are shown as they are, by what they are."""


class OutputFile(Result):
    """One output file of a step."""

    path: str
    """Relative to the folder of the step, with slashes."""
    bytes: int
    sha256: str


class StepResult(Result):
    """Base of the result of every step. Saved with a manifest of the step's files and a seal, it marks the step as finished."""

    OUTPUTS: ClassVar[tuple[str, ...]] = ()
    """Files and folders that later steps read. Their contents count in the keys of those steps."""

    key: str
    """Content key of the step: a hash of its inputs and of the code it reaches. Durations do not count in it."""
    directory: Path
    seconds: float
    manifest: tuple[OutputFile, ...] = ()
    seal: str = ""
    """SHA-256 of all other fields. It and the manifest are empty until the step ends."""

    def section(self) -> str:
        """What the report and the command line say about it, as Markdown; empty where they know the result."""
        return ""

    def sealed(self, manifest: tuple[OutputFile, ...]) -> Self:
        """The result of a finished step, with a seal that detects a change of the saved file."""
        unsealed = self.model_copy(update={"manifest": manifest, "seal": ""})
        return unsealed.model_copy(update={"seal": unsealed._digest()})

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read what `save` wrote; `DamagedError` where the file changed since."""
        try:
            return super().load(path)
        except ValueError as error:
            raise DamagedError("the result cannot be read", place=str(path)) from error

    def moved_to(self, directory: Path) -> Self:
        """The result after its folder was moved, alone or with the folders around it: all paths that moved with it change.

        What both paths have in common at their end, OUTPUT_DIR/NAME/STEP/FOLDER at most, has moved as a whole.
        """
        before, now = self.directory.parts, directory.parts
        same = next((n for n in range(4) if n >= min(len(before), len(now)) - 1 or before[-n - 1] != now[-n - 1]), 4)
        old, new = str(Path(*before[: len(before) - same])), str(Path(*now[: len(now) - same]))

        def follow(value: object) -> object:
            if isinstance(value, dict):
                return {name: follow(item) for name, item in value.items()}
            if isinstance(value, list):
                return [follow(item) for item in value]
            inside = isinstance(value, str) and (value == old or value.startswith(f"{old}/"))
            return new + str(value)[len(old) :] if inside else value

        moved = type(self).model_validate(follow(json.loads(self.model_dump_json())))
        return moved.sealed(moved.manifest) if self.seal else moved

    def _digest(self) -> str:
        return hashlib.sha256(self.model_dump_json(exclude={"seal"}).encode()).hexdigest()


def step_results(value: object) -> Iterator[StepResult]:
    """Every result of a step in a value, at any depth, itself included."""
    if isinstance(value, StepResult):
        yield value
    if isinstance(value, BaseModel):
        value = list(value.__dict__.values())
    elif isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, list | tuple):
        return
    for item in value:
        yield from step_results(item)
