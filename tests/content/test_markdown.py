"""Markdown tables hold any text in one cell each."""

import re

from hypothesis import given
from hypothesis import strategies as st

from grpo_tasks.content.markdown import as_markdown, code, table
from schemas.results.base import Section


def split_cells(line):
    """The cells of a table line as a Markdown renderer splits it: at bars behind an even number of backslashes."""
    return re.split(r"(?<!\\)(?:\\\\)*\|", line)[1:-1]


def test_numbers_are_aligned_right_and_text_left():
    assert table(["file", "rows"], [["a.csv", "12"], ["b.csv", "7"]], right=["rows"]) == (
        "| file | rows |\n|---|---:|\n| a.csv | 12 |\n| b.csv | 7 |"
    )


def test_markup_is_shown_as_text():
    assert table(["found"], []) == "| found |\n|---|"
    assert "&lt;img src=x>" in table(["found"], [["<img src=x>"]])
    assert "| `<b>` |" in table(["found"], [[code("<b>")]])
    # A backtick would end the code span.
    assert code("`![x](http://example.org)`") == "`'![x](http://example.org)'`"
    assert code(" \n") == "(blank)"


@given(st.lists(st.text(alphabet="a|\\`<\n\r\t é", max_size=12), min_size=2, max_size=2), st.booleans())
def test_any_text_stays_in_its_own_cell(texts, as_code):
    cells = [code(text) for text in texts] if as_code else texts
    lines = table(["first", "second"], [cells]).split("\n")
    assert len(lines) == 3
    assert len(split_cells(lines[2])) == 2


def test_sections_follow_each_other_and_show_quotes_unchanged():
    table_of = Section(title="Guards", text="Both passed.", columns=("guard", "p"), rows=[["safety", "0.5"]], right=("p",))
    quoted = Section(quotes={"Before": "# fine\n```", "After": ""})
    assert as_markdown([table_of, quoted]) == (
        "## Guards\n\nBoth passed.\n\n| guard | p |\n|---|---:|\n| safety | 0.5 |\n\n"
        "Before:\n\n    # fine\n    ```\n\nAfter:\n\n    (empty)\n"
    )
