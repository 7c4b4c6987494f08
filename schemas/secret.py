"""Secrets stay where they came from: nothing that is shown, logged or recorded holds one.

    hide("postgresql://me:pw@host/db")  ->  "postgresql://me:***@host/db"      hide("... hf_abc ...")  ->  "... *** ..."
    has_password("https://TOKEN@host")  ->  True                               secrets_in(config tree)  ->  places that hold one

A secret is: the password or token before the @ of an address, a parameter of an address whose name says so (?api_key=), an
Authorization header, a private key, and the value of an environment variable whose name says so (each line of it too), however it
is written in the text: plain, as in JSON, in Python, in HTML or in an address. What no rule describes is not found, such as
a password in a sentence.

Every pattern reads a text once: the time grows with its length and no faster.
"""

import html
import json
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any
from urllib.parse import quote, quote_plus, unquote

HIDDEN = "***"
_SHORTEST = 6
"""Characters from which a value is hidden; shorter ones would blot out ordinary text."""
_UNMISTAKABLE = 12
"""Characters from which a value is hidden inside a longer word as well."""
_LONG_NAME = 20
"""Characters from which the user's name in an address is taken for a token."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SAYS_SECRET = ("PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "SECRETS", "CREDENTIAL", "CREDENTIALS", "TOKEN", "APIKEY")
"""A word of a name that ends so says that a secret follows (PGPASSWORD; not TOKENIZERS)."""
_SAYS_SECRET_LAST = ("KEY", "PASS", "PWD", "AUTH", "JWT", "PAT", "SIG", "SIGNATURE")
_KINDS_OF_KEY = ("API", "ACCESS", "SECRET", "PRIVATE", "SIGNING", "ENCRYPTION", "MASTER", "AUTH")
_SAYS_WHERE = ("FILE", "PATH", "DIR", "FOLDER", "SOCK", "SOCKET", "TTL", "EXPIRY")
"""Last words of names that say where a secret is kept or how long, not what it is."""

_ADDRESS = re.compile(r"(?<=://)[^\s\"'<>`]+")
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^:]*)(?::[0-9]*)?")
_END_OF_HOST = re.compile(r"[/?#]")
_PARAMETER = re.compile(r"([?&;])([A-Za-z0-9_.-]{1,80})=([^\s\"'<>`&;#]+)")
_HEADER = re.compile(r"(?i)(authorization[\"']?\s{0,9}[:=]\s{0,9}[\"']?(?:basic|bearer|token)\s{1,9})[^\s\"',;]+")
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,60}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]{0,60}PRIVATE KEY-----|\Z)", re.DOTALL
)
_LOOKS_RANDOM = re.compile(r"(?=[^0-9]*[0-9])(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9_.=/+:-]{16,}")


def hide(text: str) -> str:
    """The text without the secrets that are known here."""
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    for value in sorted(_known(), key=len, reverse=True):
        if value not in text:
            continue
        if len(value) >= _UNMISTAKABLE:
            text = text.replace(value, HIDDEN)
        else:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", HIDDEN, text)
    text = _ADDRESS.sub(_without_user, text)
    text = _PARAMETER.sub(_without_value, text)
    return _HEADER.sub(rf"\1{HIDDEN}", text)


def hide_output() -> None:
    """Have everything that this process prints pass through `hide`: what libraries print, and tracebacks, too."""
    for stream in (sys.stdout, sys.stderr):
        if not getattr(stream, "hides_secrets", False):
            write = stream.write
            stream.write = lambda text, write=write: (write(hide(text)), len(text))[1]  # type: ignore[method-assign]
            stream.hides_secrets = True  # type: ignore[union-attr]


def has_password(address: str) -> bool:
    """Whether an address brings a password or token along. In doubt, yes: `host:80/x@y` may be a password with a slash."""
    if any(_user_of(found, doubt=True) for found in _ADDRESS.finditer(address)):
        return True
    return any(is_secret_name(found[2]) for found in _PARAMETER.finditer(address))


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable, parameter or key of this name holds a secret: DB_PWD, api_key, sshPrivateKey; not MONKEY, PATH, PWD."""
    words = [word.upper() for word in _WORD.findall(name)]
    while words and words[-1].isdigit():
        words.pop()
    if not words or words[-1] in _SAYS_WHERE or "PUBLIC" in words or words in (["PWD"], ["OLD", "PWD"]):
        return False
    if words[-1] in _SAYS_SECRET_LAST or any(word.endswith(_SAYS_SECRET) for word in words):
        return True
    return any((kind in _KINDS_OF_KEY and key == "KEY") or (kind, key) == ("AUTH", "STRING") for kind, key in pairwise(words))


def secrets_in(node: Any, place: str = "") -> Iterator[str]:
    """Places of a tree of settings (dotted) that hold a password, token or key."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            inner = f"{place}.{key}" if place else str(key)
            if _is_secret_setting(str(key), value):
                yield inner
            else:
                yield from secrets_in(value, inner)
    elif isinstance(node, list | tuple):
        for index, (before, value) in enumerate(zip(["", *node], node, strict=False)):
            flag, equals, given = value.partition("=") if isinstance(value, str) else ("", "", "")
            pair = (flag, given) if equals else (before, value)
            if isinstance(pair[0], str) and pair[0].startswith("-") and _is_secret_setting(pair[0], pair[1]):
                yield f"{place}.{index}"
            else:
                yield from secrets_in(value, f"{place}.{index}")
    elif isinstance(node, str | os.PathLike) and _holds_secret(str(node)):
        yield place


def _is_secret_setting(name: str, value: Any) -> bool:
    # `pad_token: <pad>` and `sort_key: answer` are no secrets; a password may be any text.
    if not isinstance(value, str) or not value or not is_secret_name(name):
        return False
    words = [word.upper() for word in _WORD.findall(name)]
    vague = words[-1] in ("TOKEN", *_SAYS_SECRET_LAST) and not any(word in _KINDS_OF_KEY for word in words)
    return not vague or _LOOKS_RANDOM.fullmatch(value) is not None


def _holds_secret(text: str) -> bool:
    hidden = _HEADER.sub(HIDDEN, _PARAMETER.sub(_without_value, _ADDRESS.sub(_without_user, _PRIVATE_KEY.sub(HIDDEN, text))))
    return hidden != text or any(value in text for value in _known() if len(value) >= _UNMISTAKABLE)


def _user_of(found: re.Match[str], *, doubt: bool = False) -> tuple[str, str, str] | None:
    """(shown, hidden, remainder) of what follows `://`, when it begins with a password or token.

    The password may hold characters that an address should hold in percent signs only: it ends at the last @. With `doubt`,
    `host:80/x@y` holds one.
    """
    rest = found[0]
    head = _END_OF_HOST.split(rest, maxsplit=1)[0]
    user, at, host = head.rpartition("@")
    scheme = found.string[max(0, found.start() - 8) : found.start() - 3].lower()
    if at and ":" not in user and (_HOST.fullmatch(host) or scheme.endswith("ssh")):
        # A name alone; for web addresses it is a token.
        return ("", user, rest[len(user) :]) if user and scheme.endswith(("http", "https")) else None
    if "@" not in rest or (not at and _HOST.fullmatch(head) and not (doubt and ":" in head)):
        return None
    name = head.partition(":")[0]
    whole, _, host = rest.rpartition("@")
    password = whole[len(name) + 1 :]
    if not password or len(name) >= _LONG_NAME:
        return "", whole, f"@{host}"
    return f"{name}:", password, f"@{host}"


def _without_user(found: re.Match[str]) -> str:
    parts = _user_of(found)
    return found[0] if parts is None else f"{parts[0]}{HIDDEN}{parts[2]}"


def _without_value(found: re.Match[str]) -> str:
    return f"{found[1]}{found[2]}={HIDDEN}" if is_secret_name(found[2]) else found[0]


def _known() -> set[str]:
    values: set[str] = set()
    for name, value in os.environ.items():
        if is_secret_name(name):
            # USER:PASSWORD is one variable for some servers.
            values |= {value, value.strip(), value.partition(":")[2], *_lines(value)}
        elif "://" in value:
            values |= _parts_of_address(value)
    return {written for value in values if len(value) >= _SHORTEST for written in _written(value)}


def _lines(value: str) -> Iterable[str]:
    lines = [line.strip() for line in value.splitlines()]
    # The frame of a key is no secret.
    return [line for line in lines if not line.startswith("-----")] if len(lines) > 1 else []


def _parts_of_address(value: str) -> set[str]:
    """The secrets of a variable that is an address, such as MLFLOW_TRACKING_URI."""
    found = _ADDRESS.search(value)
    parts = _user_of(found, doubt=True) if found else None
    return ({parts[1], unquote(parts[1])} if parts else set()) | {
        each[3] for each in _PARAMETER.finditer(value) if is_secret_name(each[2])
    }


def _written(value: str) -> set[str]:
    """The value as different texts write it."""
    python, plain = repr(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]
    in_address = {write(value, errors="surrogateescape") for write in (quote, quote_plus)} | {
        quote(value, "", None, "surrogateescape")
    }
    return {value, python, plain, json.dumps(value)[1:-1], html.escape(value), *in_address}
