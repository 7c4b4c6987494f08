"""Templates escape what they show and never show a blank for a forgotten value."""

import jinja2
import pytest

from grpo_tasks.reporting.page import percent, render, short


def test_a_value_that_a_template_needs_and_nobody_gave_is_an_error():
    with pytest.raises(jinja2.UndefinedError):
        render("compare.html")


def test_a_share_is_shown_in_percent():
    assert percent(0.1234) == "12.3 %"


@pytest.mark.parametrize(("chars", "shown"), [(1_500, 1_500), (1_501, 1_504)])
def test_a_long_text_is_shortened(chars, shown):
    assert len(short("x" * chars)) == shown
