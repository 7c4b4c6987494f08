"""Secrets stay where they came from: nothing that is shown, logged or recorded holds one.

    hide("postgresql://me:pw@host/db")  ->  "postgresql://me:***@host/db"      hide("... hf_abc ...")  ->  "... *** ..."

A secret is a password in an address, and the value of an environment variable whose name says so.
"""

import os
import re

HIDDEN = "***"
_SECRET_NAME = re.compile(r"TOKEN|SECRET|PASSWORD|PASSWD|API_?KEY|ACCESS_KEY|AUTH_STRING|CREDENTIAL", re.IGNORECASE)
_SHORTEST = 8
"""Characters from which a value is hidden; shorter ones would blot out ordinary text."""
_IN_ADDRESS = re.compile(r"(?<=://)([^/\s:@]{0,500}):([^/\s@]{1,500})(?=@)")


def hide(text: str) -> str:
    """The text without the secrets that are known here."""
    for value in sorted(_known(), key=len, reverse=True):
        text = text.replace(value, HIDDEN)
    return _IN_ADDRESS.sub(rf"\1:{HIDDEN}", text)


def has_password(address: str) -> bool:
    """Whether an address brings a password along."""
    return _IN_ADDRESS.search(address) is not None


def _known() -> set[str]:
    named = {value for name, value in os.environ.items() if _SECRET_NAME.search(name)}
    # USER:PASSWORD is one variable for some servers.
    halves = {value.partition(":")[2] for value in named}
    return {value for value in named | halves if len(value) >= _SHORTEST}
