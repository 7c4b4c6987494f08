"""The notebook of the library runs from top to bottom, shows progress while a cell works, and is stored without outputs."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

FILE = Path(__file__).resolve().parents[2] / "examples" / "library" / "train.ipynb"
QUICK = (
    '"stages.0.max_steps=2", "stages.1.max_steps=2", "stages.0.per_device_train_batch_size=8", '
    '"stages.1.per_device_train_batch_size=8", "data.train.0.max_rows=50", "data.eval.0.max_rows=8", "resources.num_threads=1"'
)
absent = [name for name in ("nbclient", "ipykernel") if importlib.util.find_spec(name) is None]


def test_the_notebook_is_stored_without_outputs():
    cells = json.loads(FILE.read_text(encoding="utf-8"))["cells"]
    assert all(not cell["outputs"] and cell["execution_count"] is None for cell in cells if cell["cell_type"] == "code")


@pytest.mark.long
@pytest.mark.ci
@pytest.mark.timeout(1800)
@pytest.mark.skipif(bool(absent), reason=f"{', '.join(absent)} is not installed: pip install '.[dev]'")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_notebook_runs_and_shows_progress_in_its_cells(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(FILE, as_version=4)
    changed = [cell for cell in notebook.cells if "stages.0.max_steps=40" in cell.source]
    assert len(changed) == 1
    changed[0].source = changed[0].source.replace('"stages.0.max_steps=40", "stages.1.max_steps=40"', QUICK)
    NotebookClient(notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = {
        cell.source: "".join(output.get("text", "") + str(output.get("data", {})) for output in cell.outputs)
        for cell in notebook.cells
        if cell.cell_type == "code"
    }
    [training] = [text for source, text in outputs.items() if "first = train_stage" in source]
    assert re.search(r"update 2/2", training)
    assert "format: 2 updates, stopped by max_steps" in training
    [evaluated] = [text for source, text in outputs.items() if "after = evaluate" in source]
    assert "sampling" in evaluated
    assert "image/png" in "".join(outputs.values())
    assert "error" not in [output.output_type for cell in notebook.cells for output in cell.get("outputs", [])]
