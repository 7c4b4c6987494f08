"""The glossary's words that are not used: nothing that a person reads has one.

pages        README, CONTRIBUTING, CHANGELOG, docs/, examples/
code         messages, docstrings, comments and names
templates    the HTML of the reports
presets      comments of deploy/presets and of the examples' configs
"""

import re

from tests.docs.pages import DOCS, ROOT

CODE = ("flows", "grpo_tasks", "schemas")
ALLOWED = {
    ("CHANGELOG.md", "mend"): "names the word that errors no longer use",
}
"""File and word -> why it may stand there; None stands for every word."""


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
        for word in PATTERN.findall(text.replace("_", " ")):  # the words of a name
            if not {(name, None), (name, word.lower())} & ALLOWED.keys():
                yield f"{name}:{number}: {word} (write: {FORBIDDEN[word.lower()]}): {' '.join(text.split())[:100]}"


def plain_lines(path):
    return enumerate(path.read_text(encoding="utf-8").splitlines(), 1)


def test_the_table_has_words():
    assert len(FORBIDDEN) > 15


def test_a_word_is_found_in_texts_and_names_and_not_inside_another():
    for text, seen in (("a Keeper that ended", True), ("def the_keeper():", True), ("the bookkeeper ended", False)):
        assert bool(list(lines_with_words(ROOT / "module.py", [(1, text)]))) is seen
    assert FORBIDDEN["keeper"] == "supervisor"


def test_no_page_has_a_word_that_is_not_used():
    top = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "deploy/README.md")]
    pages = [*top, *sorted(DOCS.glob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
    found = [line for page in pages for line in lines_with_words(page, plain_lines(page))]
    assert found == [], "\n".join(found)


def test_no_code_has_a_word_that_is_not_used():
    files = [path for package in CODE for path in sorted((ROOT / package).rglob("*.py"))]
    found = [line for path in files for line in lines_with_words(path, plain_lines(path))]
    assert found == [], "\n".join(found)


def test_no_template_preset_or_example_has_a_word_that_is_not_used():
    texts = [path for package in CODE for path in sorted((ROOT / package).rglob("*.html"))]
    texts += [*sorted((ROOT / "deploy").rglob("*.yaml")), *sorted((ROOT / "examples").rglob("*.yaml"))]
    texts += sorted((ROOT / "examples").rglob("*.py"))
    found = [line for path in texts for line in lines_with_words(path, plain_lines(path))]
    assert found == [], "\n".join(found)
