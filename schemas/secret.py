"""Keeps secrets out of everything that is shown, logged or recorded.

    hide("postgresql://me:pw@host/db")  ->  "postgresql://me:***@host/db"      hide("... hf_abc ...")  ->  "... *** ..."
    has_password("https://TOKEN@host")  ->  True                               secrets_in(config)  ->  fields that contain one

A secret is

    in an address    the password or token before its @, a query parameter with the name of a secret (?api_key=), the path of a
                     webhook of Slack, Discord, Teams and others
    in a header      Authorization, Bearer, Cookie, and X-... with the name of a secret
    in a setting     password=... of a connection string, NAME=... and name = "..." with the name of a secret
    by its shape     private keys, JSON web tokens, and keys with a known beginning (hf_, AKIA, ghp_, sk-, xoxb-, ...)
    by its value     that of an environment variable with the name of a secret, as a whole and line by line

It is found in plain text and in the encodings of JSON, Python, HTML and addresses. A secret that no rule describes, such as a
password in a sentence, is not found.

All patterns take time linear in the length of the text.
"""

import html
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import pairwise
from typing import Any
from urllib.parse import quote, quote_plus, unquote

HIDDEN = "***"
_SHORTEST = 6
"""Shortest value that is hidden, in characters. Hiding a shorter one would remove ordinary text."""
_UNMISTAKABLE = 12
"""Shortest value that is hidden inside a longer word, in characters."""
_LONG_NAME = 20
"""Shortest user name in an address that counts as a token, in characters."""

_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_SAYS_CERTAINLY = ("PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "SECRETS", "CREDENTIAL", "CREDENTIALS", "APIKEY")
_SAYS_SECRET = (*_SAYS_CERTAINLY, "TOKEN")
"""Endings of words that mark the name of a secret (PGPASSWORD; not TOKENIZERS)."""
_SAYS_SECRET_LAST = (
    *("KEY", "PASS", "PWD", "PW", "AUTH", "JWT", "PAT", "SIG", "SIGNATURE", "BEARER", "COOKIE", "COOKIES", "WEBHOOK"),
)
_PAIRS = (("AUTH", "STRING"), ("WEBHOOK", "URL"), ("WEBHOOK", "URI"))
"""Last two words of names of secrets."""
_KINDS_OF_KEY = ("API", "ACCESS", "SECRET", "PRIVATE", "SIGNING", "ENCRYPTION", "MASTER", "AUTH")
_SAYS_WHERE = ("FILE", "PATH", "DIR", "FOLDER", "SOCK", "SOCKET", "TTL", "EXPIRY", "VARIABLE")
"""Last words of names that describe where or how long a secret is kept, not the secret."""

_ADDRESS = re.compile(r"(?<=://)[^\s\"'<>`]+")
_HOST = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^:]*)(?::[0-9]*)?")
_END_OF_HOST = re.compile(r"[/?#]")
_PARAMETER = re.compile(r"([?&;]([A-Za-z0-9_.-]{1,80})=)([^\s\"'<>`&;#]+)")
_HEADER = re.compile(
    r"(?i)(authorization[\"']?\s{0,9}[:=]\s{0,9}[\"']?(?:basic|bearer|token|apikey|digest|negotiate)\s{1,9})[^\s\"',;]+"
)
_BEARER = re.compile(r"(?i)(\bbearer\s{1,9})(?=[A-Z._~+/=-]{0,99}[0-9])[A-Z0-9._~+/=-]{8,}")
_COOKIE = re.compile(r"(?i)((?<![\w-])(?:set-)?cookie[\"']?\s{0,9}[:=]\s{0,9}[\"']?)(?=[\w.-]{1,99}=)[^\r\n\"'\\]+")
_OTHER_HEADER = re.compile(r"(?i)((?<![\w-])(x-[a-z0-9-]{1,60})[\"']?\s{0,9}[:=]\s{0,9}[\"']?)[^\s\"',;]{6,}")
_CONNECTION = re.compile(
    r"((?<![\w.-])[A-Za-z]{0,20}(?i:password|passwd)=|(?<=[;\s\"'])[Pp]wd=)"
    r"(?:'(?:[^'\\]|\\.){1,500}'|(?!\*\*\*|None\b|[A-Z]{1,99}\b)[^\s'\",;&]{1,500})"
)
"""A password of a connection string; in capital letters it is a placeholder."""
_VARIABLE = re.compile(r"((?<![\w.-])([A-Z][A-Z0-9]{1,60}_[A-Z0-9_]{1,60})=)(?=[^\s\"',;&a-z0-9]{0,99}[a-z0-9])[^\s\"',;&]{6,}")
_LITERAL = re.compile(r"((?<![\w.-])([A-Za-z_][\w-]{0,60})\\?[\"']?\s{0,9}[:=]\s{0,9}(\\?[\"']))([^\"'\\\r\n]{1,500})(?=\3)")
_WEBHOOK = re.compile(
    r"((?:hooks\.slack\.com/(?:services|workflows|triggers)|discord(?:app)?\.com/api/(?:v[0-9]{1,2}/)?webhooks|"
    r"webhook\.office\.com/webhookb2|outlook\.office\.com/webhook|hooks\.zapier\.com/hooks/catch|"
    r"maker\.ifttt\.com/trigger|open\.(?:feishu\.cn|larksuite\.com)/open-apis/bot/v2/hook)/|api\.telegram\.org/bot)"
    r"[^\s\"'<>`]+"
)
_SHAPES = re.compile(
    # A line break that JSON or Python has written stands for one.
    r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt]))(?:"
    r"(?:(?:hf|gh[pousr]|npm|pn[ub]|gsk|api_org|github_pat|dckr_pat)_|(?:glpat|nvapi)-)[A-Za-z0-9_-]{20,}|(?:AKIA|ASIA)[0-9A-Z]{16}|"
    r"eyJ[\w-]{8,}\.eyJ[\w-]{8,}\.[\w-]*|xox[abeprs]-[A-Za-z0-9-]{10,}|sk-(?=[A-Za-z_-]{0,99}[0-9])[A-Za-z0-9_-]{20,}|"
    r"AIza[\w-]{35}|dapi[0-9a-f]{32}|pypi-[\w-]{50,})"
)
_PRIVATE_KEY = re.compile(
    r"-----BEGIN [A-Z0-9 ]{0,60}PRIVATE KEY-----.*?(?:-----END [A-Z0-9 ]{0,60}PRIVATE KEY-----|\Z)", re.DOTALL
)
_HASH = re.compile(r"[0-9a-f]{16,}")
_LOOKS_RANDOM = re.compile(r"(?=[^0-9]*[0-9])(?=[^A-Za-z]*[A-Za-z])[A-Za-z0-9_.=/+:-]{16,}")


def hide(text: str) -> str:
    """The text with every known secret replaced by `***`."""
    text = _replaced(_SHAPE_RULES, text)
    for value in sorted(_known(), key=len, reverse=True):
        if value not in text:
            continue
        if len(value) >= _UNMISTAKABLE:
            text = text.replace(value, HIDDEN)
        else:
            text = re.sub(rf"(?<!\w){re.escape(value)}(?!\w)", HIDDEN, text)
    return _replaced(_PLACE_RULES, text)


def hide_written(text: str) -> str:
    """`hide` for texts that a program reads again: values of the environment, which may be ordinary words, stay."""
    return _replaced(_PLACE_RULES, _replaced(_SHAPE_RULES, text))


def _replaced(rules: "tuple[_Rule, ...]", text: str) -> str:
    # Looking for a word takes a hundredth of the time of a pattern.
    lower = text.lower()
    for words, pattern, replacement in rules:
        if any(word in lower for word in words.split()):
            text = pattern.sub(replacement, text)
    return text


def _named(found: re.Match[str]) -> str:
    return f"{found[1]}{HIDDEN}" if is_secret_name(found[2]) else found[0]


def _literal(found: re.Match[str]) -> str:
    return f"{found[1]}{HIDDEN}" if _is_secret_setting(found[2], found[4]) else found[0]


def hide_output() -> None:
    """Pass everything that this process prints through `hide`."""
    for stream in (sys.stdout, sys.stderr):
        if not getattr(stream, "hides_secrets", False):
            write = stream.write
            stream.write = lambda text, write=write: (write(hide(text)), len(text))[1]  # type: ignore[method-assign]
            stream.hides_secrets = True  # type: ignore[union-attr]


def has_password(address: str) -> bool:
    """Whether an address contains a password or token. In doubt, yes: `host:80/x@y` may be a password with a slash."""
    if any(_user_of(found, doubt=True) for found in _ADDRESS.finditer(address)):
        return True
    return any(is_secret_name(found[2]) for found in _PARAMETER.finditer(address))


@lru_cache(maxsize=4096)
def is_secret_name(name: str) -> bool:
    """Whether a variable, parameter or key of this name is a secret: DB_PWD, api_key, sshPrivateKey; not MONKEY, PATH, PWD."""
    words = [word.upper() for word in _WORD.findall(name)]
    while words and words[-1].isdigit():
        words.pop()
    if not words or words[-1] in _SAYS_WHERE or "PUBLIC" in words or words in (["PWD"], ["OLD", "PWD"]):
        return False
    if words[-1] in _SAYS_SECRET_LAST or tuple(words[-2:]) in _PAIRS or any(word.endswith(_SAYS_SECRET) for word in words):
        return True
    return any(kind in _KINDS_OF_KEY and key == "KEY" for kind, key in pairwise(words))


def secrets_in(node: Any, place: str = "") -> Iterator[str]:
    """Dotted paths of settings that contain a password, token or key."""
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
    elif isinstance(node, str | os.PathLike):
        text = str(node)
        if hide_written(text) != text or any(value in text for value in _known() if len(value) >= _UNMISTAKABLE):
            yield place


def _is_secret_setting(name: str, value: Any) -> bool:
    # `pad_token: <pad>` and `sort_key: answer` are not secrets, while a password may be any text.
    if not isinstance(value, str) or not value or not is_secret_name(name):
        return False
    words = [word.upper() for word in _WORD.findall(name)]
    certain = any(word.endswith(_SAYS_CERTAINLY) or word in _KINDS_OF_KEY for word in words)
    # A key may also be a content key: the hash of what a step was made from.
    return certain or (_LOOKS_RANDOM.fullmatch(value) is not None and _HASH.fullmatch(value) is None)


def _user_of(found: re.Match[str], *, doubt: bool = False) -> tuple[str, str, str] | None:
    """(shown, hidden, remainder) of the text after `://` if it starts with a password or token; else None.

    The password may contain characters that should be percent-encoded, so it ends at the last @. With `doubt`, `host:80/x@y`
    contains one.
    """
    rest = found[0]
    head = _END_OF_HOST.split(rest, maxsplit=1)[0]
    user, at, host = head.rpartition("@")
    scheme = found.string[max(0, found.start() - 8) : found.start() - 3].lower()
    if at and ":" not in user and (_HOST.fullmatch(host) or scheme.endswith("ssh")):
        # A user name without a password. In a web address it is a token.
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


_Rule = tuple[str, re.Pattern[str], Callable[[re.Match[str]], str] | str]
"""Words, in lower case, one of which a text contains if the pattern finds something in it; the pattern; what replaces it."""
_KEPT = rf"\1{HIDDEN}"
_SHAPE_RULES: tuple[_Rule, ...] = (
    ("-----begin", _PRIVATE_KEY, HIDDEN),
    (
        "hf_ ghp_ gho_ ghu_ ghs_ ghr_ npm_ pnu_ pnb_ gsk_ api_org_ github_pat_ dckr_pat_ "
        "glpat- nvapi- akia asia eyj xox sk- aiza dapi pypi-",
        _SHAPES,
        HIDDEN,
    ),
    ("hooks webhook /trigger/ /hook/ api.telegram.org/bot", _WEBHOOK, _KEPT),
)
"""What a secret looks like, wherever it stands."""
_PLACE_RULES: tuple[_Rule, ...] = (
    ("://", _ADDRESS, _without_user),
    ("=", _PARAMETER, _named),
    ("authorization", _HEADER, _KEPT),
    ("bearer", _BEARER, _KEPT),
    ("cookie", _COOKIE, _KEPT),
    ("password= passwd= pwd=", _CONNECTION, _KEPT),
    ("x-", _OTHER_HEADER, _named),
    ("=", _VARIABLE, _named),
    ("' \"", _LITERAL, _literal),
)
"""Where a secret stands."""


def _known() -> set[str]:
    values: set[str] = set()
    for name, value in os.environ.items():
        if is_secret_name(name):
            # Some servers take USER:PASSWORD in one variable.
            values |= {value, value.strip(), value.partition(":")[2], *_lines(value)}
        elif "://" in value:
            values |= _parts_of_address(value)
    return {written for value in values if len(value) >= _SHORTEST for written in _written(value)}


def _lines(value: str) -> Iterable[str]:
    lines = [line.strip() for line in value.splitlines()]
    # The BEGIN and END lines of a key are not secret.
    return [line for line in lines if not line.startswith("-----")] if len(lines) > 1 else []


def _parts_of_address(value: str) -> set[str]:
    # Of a variable that is an address, such as MLFLOW_TRACKING_URI.
    found = _ADDRESS.search(value)
    parts = _user_of(found, doubt=True) if found else None
    return ({parts[1], unquote(parts[1])} if parts else set()) | {
        each[3] for each in _PARAMETER.finditer(value) if is_secret_name(each[2])
    }


def _written(value: str) -> set[str]:
    # The encodings in which it may appear.
    python, plain = repr(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1]
    in_address = {write(value, errors="surrogateescape") for write in (quote, quote_plus)} | {
        quote(value, "", None, "surrogateescape")
    }
    return {value, python, plain, json.dumps(value)[1:-1], html.escape(value), *in_address}
