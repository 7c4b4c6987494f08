"""The glossary's words that are not used: nothing that a person reads has one.

    pages        README, CONTRIBUTING, CHANGELOG, docs/, examples/
    code         strings that a message is made of; docstrings of commands, flows and steps (--help, Prefect) and of the config's
                 sections and fields (the form, `grpo fields`)
    templates    the HTML of the reports
    presets      comments of deploy/presets and of the examples' configs

Names of functions and variables, docstrings of other code and comments are not read here.
"""

import ast
import re

import pytest

from tests.docs.pages import DOCS, ROOT

CODE = ("flows", "grpo_tasks", "schemas")
"""Packages whose messages are read."""
ALLOWED = {
    ("CHANGELOG.md", "mend"): "names the word that errors no longer use",
}
"""File and word -> why it may stand there; None stands for every word."""
SHOWN = re.compile(r"\s")
"""A string without a blank is a name or a key, not a message."""


def forbidden():
    """Word or phrase -> what to write, from the table of words."""
    table = (ROOT / "tests/docs/words.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    return {word: better for word, better in rows if word not in ("not", "---")}


FORBIDDEN = forbidden()
PATTERN = re.compile(rf"\b({'|'.join(map(re.escape, sorted(FORBIDDEN, key=len, reverse=True)))})\b", re.IGNORECASE)


def lines_with_words(path, numbered):
    """`file:line: word (write: ...)` for every forbidden word in the numbered texts of a file."""
    name = path.relative_to(ROOT).as_posix()
    for number, text in numbered:
        for word in PATTERN.findall(text):
            if not {(name, None), (name, word.lower())} & ALLOWED.keys():
                yield f"{name}:{number}: {word} (write: {FORBIDDEN[word.lower()]}): {' '.join(text.split())[:100]}"


def shown_strings(path):
    """Strings of a module that may be shown: all but docstrings of functions, classes and modules that no user reads."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    hidden = set(unseen_docstrings(tree, path.relative_to(ROOT)))
    inside = {
        id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node) if part is not node
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside and id(node) not in hidden:
            text = node.value
        else:
            continue
        if SHOWN.search(text.strip()):
            yield node.lineno, text


def unseen_docstrings(tree, path):
    """The ids of docstrings that no user sees: of modules, and of classes, fields and functions that are not shown anywhere."""
    config = path.parts[:2] == ("schemas", "config")
    shown = path.parts[0] == "flows" or (path.parts[0] == "grpo_tasks" and len(path.parts) == 2)
    for parent in ast.walk(tree):
        seen = config if isinstance(parent, ast.ClassDef) else shown and isinstance(parent, ast.FunctionDef)
        for node in getattr(parent, "body", []) if isinstance(getattr(parent, "body", []), list) else []:
            if not seen and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                yield id(node.value)


def plain_lines(path):
    return enumerate(path.read_text(encoding="utf-8").splitlines(), 1)


def test_the_table_has_words():
    assert len(FORBIDDEN) > 15
    assert FORBIDDEN["keeper"] == "supervisor"


def test_no_page_has_a_word_that_is_not_used():
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md")]
    pages = [*top, *sorted(DOCS.glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
    found = [line for page in pages for line in lines_with_words(page, plain_lines(page))]
    assert found == [], "\n".join(found)


def test_no_message_of_the_code_has_a_word_that_is_not_used():
    files = [path for package in CODE for path in sorted((ROOT / package).rglob("*.py"))]
    found = [line for path in files for line in lines_with_words(path, shown_strings(path))]
    assert found == [], "\n".join(found)


def test_no_template_preset_or_example_has_a_word_that_is_not_used():
    texts = [path for package in CODE for path in sorted((ROOT / package).rglob("*.html"))]
    texts += [*sorted((ROOT / "deploy").rglob("*.yaml")), *sorted((ROOT / "examples").rglob("*.yaml"))]
    texts += sorted((ROOT / "examples").rglob("*.py"))
    found = [line for path in texts for line in lines_with_words(path, plain_lines(path))]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ('raise ValueError("a keeper that ended")', True),
        ('raise ValueError(f"{name} has told nothing")', True),
        ('def f():\n    """What a keeper does."""', False),
        ('def f():\n    """Does."""\n    fail("no keeper there")', True),
        ('name = "keeper"', False),
        ('raise ValueError("the bookkeeper ended")', False),
    ],
)
def test_what_counts_as_a_message(code, seen, tmp_path, monkeypatch):
    monkeypatch.setattr("tests.docs.test_words.ROOT", tmp_path)
    path = tmp_path / "module.py"
    path.write_text(code)
    assert bool(list(lines_with_words(path, shown_strings(path)))) is seen
