"""Stages of kind sft and rejection on the embedded model and thirty sums."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.demo.arithmetic import Problem
from tests.demo.build import good_completion
from tests.grpo.conftest import Stages, stages  # noqa: F401 - a fixture


class SupervisedStages(Stages):
    """As the stages of the engine; `solution` holds a perfect demonstration of each sum."""

    def rewrite(self, change):
        """Change the extra columns of the training rows: `change(number, extra)` returns the new ones."""
        path = self.root / "train.parquet"
        rows = pq.read_table(path).to_pylist()
        for number, row in enumerate(rows):
            row["extra"] = json.dumps(change(number, json.loads(row["extra"])))
        pq.write_table(pa.Table.from_pylist(rows), path)

    def write(self, name="stage", **settings):
        if settings.get("kind", "sft") == "sft":
            chosen = {"kind": "sft", "demonstrations": {"column": "solution"}, "num_generations": 8} | settings
            chosen.setdefault("stage_rewards", [])
            return super().write(name, **chosen)
        return super().write(name, **settings)


@pytest.fixture
def sums(stages, tmp_path):  # noqa: F811 - the fixture
    found = SupervisedStages(tmp_path)
    found.rewrite(lambda number, _: {"solution": good_completion(Problem(11 + number, "+", 27))})
    return found
