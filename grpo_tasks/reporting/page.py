"""Self-contained HTML pages: images are embedded, there are no scripts, and the browser fetches nothing.

Text from a model, a data file or a user is untrusted. jinja2 escapes every value that a template shows, and secrets are hidden.
"""

import base64
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from schemas.secret import hide, hide_written

_TEMPLATES = Path(__file__).resolve().parent / "templates"
_SHOWN_CHARS = 1_500


def render(template: str, **context: object) -> str:
    """Render a template of templates/. A name that the template uses and `context` lacks is an error."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        # Before the value is escaped, where quotes still are quotes.
        finalize=lambda value: hide_written(value) if type(value) is str else value,
    )
    environment.filters |= {"percent": percent, "short": short}
    return hide(environment.get_template(template).render(**context))


def picture(path: Path) -> str:
    """A PNG as a data: URL."""
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")


def percent(value: float) -> str:
    """0.123 -> 12.3 %."""
    return f"{100 * value:.1f} %"


def short(text: str) -> str:
    """At most 1,500 characters."""
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + " ..."
