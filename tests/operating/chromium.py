"""Debian's Chromium for the tests: a page, pictures of it, and the fields of Prefect's forms."""

import os
import re
import shutil
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
SCREENSHOTS = os.environ.get("GRPO_SCREENSHOTS")
"""Folder for pictures. Set it to take those of the pages."""
MARKS = [
    pytest.mark.xdist_group("operated"),
    pytest.mark.long,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed on this machine"),
]


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        # Chromium's sandbox does not work for root, which CI is.
        # Without a graphics card Chromium would draw on the processor that the tests need; its own calls home are refused anyway.
        quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-background-networking"]
        found = driver.chromium.launch(executable_path=CHROMIUM, args=quiet)
        yield found
        found.close()


@pytest.fixture
def page(browser):
    context = browser.new_context(viewport={"width": 1400, "height": 900}, accept_downloads=True)
    made = context.new_page()
    made.set_default_timeout(30_000)
    yield made
    context.close()


def picture(page, name):
    if SCREENSHOTS:
        page.wait_for_timeout(1_000)
        page.screenshot(path=Path(SCREENSHOTS) / f"{name}.png")


def field(page, label, number=0):
    """A field of Prefect's form by its label; `number` counts fields of the same label from the top."""
    has_class = "contains(concat(' ', @class, ' '), ' schema-form-property ')"
    heading = "./div[contains(@class, 'p-label__header')]//span[@class='schema-form-property__label'"
    path = f"xpath=//div[{has_class}][{heading} and (normalize-space(.)='{label}' or normalize-space(.)='{label} (Optional)')]]"
    return page.locator(path).nth(number)


def type_into(page, label, text, number=0):
    field(page, label, number).locator("input, textarea").first.fill(text)


def choose(page, label, option, number=0):
    field(page, label, number).locator(".p-select-button__control").first.focus()
    page.keyboard.press("ArrowDown")
    page.locator(".p-select-option").filter(has_text=re.compile(f"^{option}$")).click()


LONGEST = """
() => Math.max(...[...document.querySelectorAll('*')]
  .filter(each => each === document.documentElement || ['auto', 'scroll'].includes(getComputedStyle(each).overflowY))
  .map(each => each.scrollHeight))
"""
"""Height of the page with everything that scrolls, in pixels."""


def require_two_screens(page):
    """The form that is open needs two screens at most."""
    screen, height = page.viewport_size["height"], page.evaluate(LONGEST)
    assert height <= 2 * screen, f"{height} px on a screen of {screen}"
