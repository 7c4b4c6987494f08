"""How a command reports errors: a short message for what the user can fix, a traceback for a fault of this program."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from rich.console import Console
from rich.panel import Panel

from schemas.errors import UserError, refused_by_system


@contextmanager
def report_errors() -> Iterator[None]:
    """Show a `UserError` as a panel on stderr and exit with its code; let every other exception through with its traceback."""
    try:
        yield
    except UserError as error:
        _show_and_exit(error)
    except OSError as error:
        refused = refused_by_system(error)
        if refused is None:
            raise
        _show_and_exit(refused)
    except KeyboardInterrupt:
        sys.exit(130)


def _show_and_exit(error: UserError) -> NoReturn:
    panel = Panel(str(error), title=error.title, border_style="red", title_align="left")
    Console(stderr=True, highlight=False, markup=False).print(panel)
    sys.exit(error.exit_code)
