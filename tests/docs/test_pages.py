"""The site builds without a warning, generated pages are up to date, every link leads somewhere."""

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, GENERATED, ROOT, TABLES, written_pages

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FOUND_ELSEWHERE = ("http://", "https://", "#")


@pytest.fixture(scope="module")
def generator():
    spec = importlib.util.spec_from_file_location("generate", DOCS / "generate.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_site_builds_without_a_warning(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    assert "WARNING" not in made.stderr
    page = (tmp_path / "site" / "architecture.html").read_text()
    # Nothing on a page comes from another host; a link to one is fine.
    assert not re.findall(r'(?:src|href)="https?://[^"]+\.(?:js|css|woff2?|ttf)"', page)
    assert "<code>grpo_tasks/grpo/losses.py</code>" in page


@pytest.mark.slow
def test_the_generated_pages_say_what_the_code_says(tmp_path):
    subprocess.run([sys.executable, DOCS / "generate.py", tmp_path], check=True, cwd=ROOT)
    made = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert set(made) == {*GENERATED, *TABLES}
    for name, text in made.items():
        assert (DOCS / name).read_text(encoding="utf-8") == text, "run: make docs"


def test_every_field_of_the_config_is_on_the_page_of_settings(generator):
    from schemas.config.run import RunConfig

    text = (DOCS / "reference.md").read_text(encoding="utf-8")
    named = [f"| `{name}` |" for _, model in generator.sections(RunConfig, "") for name in model.model_fields]
    whole = {f"| `{name}` |" for name in ("learning_rate", "num_generations", "max_hours", "equality", "alpha", "threshold")}
    assert whole < set(named)
    headings = set(re.findall(r"^### `(.+)`$", text, re.MULTILINE))
    assert {"stages[]", "stages[].guards.kl_blow_up", "rewards.functions.NAME.adaptive", "rollout.vllm"} < headings


@pytest.mark.parametrize("page", written_pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_link_to_a_file_leads_to_one(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    links = [link for link in LINK.findall(text) if not link.startswith(FOUND_ELSEWHERE)]
    assert [link for link in links if not (page.parent / link.partition("#")[0]).exists()] == []


def test_the_readme_is_for_ten_minutes():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 150
    demo, test = (next(line for line in text.splitlines() if line.startswith(f"    make {name}")) for name in ("demo", "test"))
    assert "runs the main job" in demo
    assert "passes the quick tests" in test


def test_the_readme_leads_to_the_index_and_the_index_to_every_page():
    assert "docs/index.md" in LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    pages = {path.name for path in DOCS.glob("*.md")} - {"index.md"}
    assert pages <= {Path(link.partition("#")[0]).name for link in LINK.findall((DOCS / "index.md").read_text(encoding="utf-8"))}


def test_the_architecture_page_names_every_room():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    rooms = {path.parent.name for path in (ROOT / "grpo_tasks").glob("*/__init__.py")}
    assert {room for room in rooms if f"| `grpo_tasks/{room}` |" not in text} == set()


def test_the_layers_of_the_architecture_page_are_those_of_the_import_rules():
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    drawing = text[text.index("## The map") : text.index("Imports go down only")]
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    rooms = [[one.strip().removeprefix("grpo_tasks.") for one in layer.split("|")] for layer in layers[2:]]
    drawn = [line.strip() for line in drawing.splitlines() if line.startswith("    ")]
    position = 0
    for layer in rooms:
        position = next(
            (at for at in range(position, len(drawn)) if all(re.search(rf"\b{room}\b", drawn[at]) for room in layer)), None
        )
        assert position is not None, f"{layer} is not drawn below the layer before"


def test_the_changelog_begins_with_the_version_of_the_project():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    [first, *rest] = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    if first == "Unreleased":
        first = rest[0]
    assert re.fullmatch(rf"{re.escape(version)} \(\d{{4}}-\d\d-\d\d\)", first)
