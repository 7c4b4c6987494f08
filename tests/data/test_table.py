"""A table that was damaged after a step wrote it is an error that names the file."""

import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from grpo_tasks.data.table import read_prompts, read_table
from schemas.errors import DamagedError

ROWS = pl.DataFrame({"prompt": [[{"role": "user", "content": "é" * 9}]] * 30, "answer": ["1"] * 30, "line": range(30)})


@pytest.mark.parametrize("content", [b"", b"PAR1", b"\0" * 999, b"PAR1" + b"\xff" * 999 + b"PAR1"])
def test_a_damaged_table_is_an_error_with_its_path_and_a_fix(tmp_path, content):
    path = tmp_path / "train.parquet"
    path.write_bytes(content)
    for read in (read_table, read_prompts):
        with pytest.raises(DamagedError, match="the table cannot be read") as caught:
            read(path)
        assert caught.value.place == str(path)
        assert "again" in caught.value.fix


def test_a_missing_table_is_an_error_with_its_path(tmp_path):
    with pytest.raises(DamagedError) as caught:
        read_table(tmp_path / "train.parquet")
    assert caught.value.place == str(tmp_path / "train.parquet")


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0, 10**6), content=st.binary(min_size=1, max_size=40), cut=st.booleans())
def test_damage_at_any_position_raises_no_other_error(tmp_path, position, content, cut):
    path = tmp_path / "train.parquet"
    ROWS.write_parquet(path, compression="uncompressed")
    intact = path.read_bytes()
    position %= len(intact)
    path.write_bytes(intact[:position] if cut else intact[:position] + content + intact[position + len(content) :])
    error = None
    try:
        read_table(path)
    except DamagedError as caught:
        error = caught
    assert error is not None or not cut
    assert error is None or error.place == str(path)
