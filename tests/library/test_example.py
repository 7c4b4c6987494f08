"""The example of the library: the same lines on the page, in the module and in the example, and they run."""

import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from grpo_tasks import library
from tests.library.test_steps import SETTINGS

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "library" / "train.py"


def lines(code):
    """The statements without blank lines, docstrings, and what only the script has."""
    code = re.sub(r'""".*?"""', "", code, flags=re.DOTALL).replace(", *sys.argv[1:]", "").replace("import sys\n", "")
    return [line for line in code.splitlines() if line.strip()]


def test_page_module_and_example_have_the_same_lines():
    page = re.search(r"```python\n(.*?)```", (ROOT / "docs" / "index.md").read_text().partition("## Library")[2], re.DOTALL)[1]
    block = library.__doc__.partition("    from grpo_tasks")
    module = textwrap.dedent(f"    from grpo_tasks{block[2]}".partition("\n\nEach function")[0])
    assert lines(page) == lines(module) == lines(EXAMPLE.read_text())


@pytest.mark.long
def test_the_example_runs(tmp_path):
    done = subprocess.run([sys.executable, EXAMPLE, *SETTINGS], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Interval(" in done.stdout or "value=" in done.stdout
    assert (tmp_path / "work" / "merged" / "model" / "config.json").exists()
