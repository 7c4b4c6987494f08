"""Where a row stands in its file, as a person writes it.

data.jsonl:7              a line of a text file: an editor opens it there
data.json, record 7       the seventh record of a JSON array, which may stand on any line
data.parquet, row 7       a file or a hub data set without lines
"""

import io
import re
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Literal

from grpo_tasks.content.shards import PACKINGS, unpacked_name
from schemas.paths import resolve, why_not_a_file

Unit = Literal["line", "row", "record"]
_PLACE = re.compile(r"(.*)(?::|, (?:line|row|record) )([0-9]{1,15})", re.DOTALL)
_START_BYTES = 4096
_TABLES = (".parquet", ".pq", ".arrow")


def row_place(source: str, number: int) -> str:
    """Where row `number`, counted from 1, of the file or data set `source` stands."""
    return place_in(source, number, unit_of(source))


def place_in(source: str, number: int, unit: str) -> str:
    """`row_place` for a source whose unit is known."""
    return f"{source}:{number}" if unit == "line" else f"{source}, {unit} {number}"


def parse_place(place: str) -> tuple[str, int]:
    """Source and number of a place as `row_place` writes it, or FILE:N whatever the unit; number 0 when it is no place."""
    found = _PLACE.fullmatch(place)
    return (found[1], int(found[2])) if found else (place, 0)


@lru_cache(maxsize=256)
def unit_of(source: str) -> Unit:
    """What the rows of a source are counted in. A source that is not on this disk is a hub data set, which has rows."""
    path = Path(resolve(source))
    plain = unpacked_name(path)
    if plain.suffix.lower() in _TABLES:
        return "row"
    if why_not_a_file(path):
        return "line" if path.suffix else "row"
    if plain.suffix.lower() != ".json":
        return "line"
    with path.open("rb") as file:
        if plain == path:
            return "record" if holds_array(path, file) else "line"
        import pyarrow as pa

        try:
            start = io.BytesIO(pa.CompressedInputStream(file, PACKINGS[path.suffix.lower()]).read(_START_BYTES))
        except OSError:
            return "line"
        return "record" if holds_array(plain, start) else "line"


def holds_array(path: Path, file: BinaryIO) -> bool:
    """Whether a `.json` file holds one array of records, and not a record on each line; leaves the file where it is."""
    if path.suffix.lower() != ".json":
        return False
    place = file.tell()
    # Byte-order marks, and the zero bytes of UTF-16, stand before the bracket.
    start = file.read(_START_BYTES).lstrip(b"\xef\xbb\xbf\xff\xfe\0 \t\r\n")
    file.seek(place)
    return start.startswith(b"[")
