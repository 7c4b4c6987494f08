r"""Mathematical equality through math-verify, within bounds. Only what passes a whitelist is parsed at all.

math-verify looks for the last expression anywhere in a text and hands it to sympy, which computes whatever is written: 9**9**9
would run for ever. Here the whole answer must be one expression: at most 200 characters, no listing (`42 43` would be read as a
mixed number), no equation chain, known commands only (no sums, integrals, factorials or limits), brackets six deep at most,
exponents of at most four digits in all, never stacked. A unit in \text{} at the end is dropped. What is left gets half a
second in the main thread (SIGALRM); in another thread the bounds alone protect.
"""

import logging
import re
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from types import FrameType
from typing import Any

from grpo_tasks.answers.numerals import unwrap

MAX_EXPRESSION_CHARS = 200
MAX_DEPTH = 6
"""Brackets inside brackets; the parser's time grows steeply with them."""
TIME_LIMIT_S = 0.5

_KNOWN_COMMAND = re.compile(
    r"[dt]?frac|sqrt|pi|cdot|times|div|pm|left|right|infty|cup|cap|in|leq?|geq?|lt|gt|neq?|(?:arc)?(?:sin|cos|tan)|cot|sec|csc"
    r"|ln|log|circ|degree|theta|alpha|beta|gamma|lambda|mu|omega|phi|begin|end|quad"
)
_KNOWN_WORD = re.compile(r"sqrt|arcsin|arccos|arctan|[pb]matrix")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_WORD = re.compile(r"[A-Za-z]{4,}")
_UNIT = re.compile(r"\\(?:text|mathrm)\{[^{}0-9]*\}$")
_STACKED = re.compile(r"\^\s*(?:\{[^{}]*\}|\([^()]*\)|\\?[A-Za-z0-9]+)\s*\^")
_EXPONENT = re.compile(r"\^\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\\?[A-Za-z0-9]+))")
_NUMBERS_SIDE_BY_SIDE = re.compile(r"[0-9.]\s+[0-9.]")
_SIDE = re.compile(r"\s*(?:[A-Za-z]|\\[A-Za-z]+)\s*(?:\([A-Za-z]\)\s*)?")


RING_AGAIN_S = 0.1
"""Seconds of computing after which the limit rings again: garbage collection may swallow a ring."""


class _OutOfTime(BaseException):
    """Not an Exception: sympy catches those while it tries one way after the other."""


def expressions_equal(prediction: str, truth: str) -> bool:
    """Whether two LaTeX or plain expressions are mathematically equal; False for all that is refused or takes too long."""
    if max(len(prediction), len(truth)) > MAX_EXPRESSION_CHARS:
        return False
    ours, theirs = _plain(prediction), _plain(truth)
    if not (is_harmless(ours) and is_harmless(theirs)) or ("=" in ours and "=" not in theirs and not _names_result(ours)):
        return False
    return _verify(ours, theirs)


def is_harmless(expression: str) -> bool:
    """Whether an expression may be given to sympy: known words and commands, no listing, no power that could grow large."""
    commands = _COMMAND.findall(expression)
    letters = _COMMAND.sub(" ", expression)
    return (
        all(_KNOWN_COMMAND.fullmatch(command) for command in commands)
        and all(_KNOWN_WORD.fullmatch(word) for word in _WORD.findall(letters))
        and not any(sign in letters for sign in "!$\n\r;&#~" if sign != "&" or "begin" not in commands)
        and _NUMBERS_SIDE_BY_SIDE.search(letters) is None
        and letters.count("=") <= 1
        and _depth(letters) <= MAX_DEPTH
        and _powers_are_small(expression)
    )


def _plain(text: str) -> str:
    return _UNIT.sub("", unwrap(text)).replace("**", "^").replace("\u2212", "-").strip()


def _names_result(expression: str) -> bool:
    # x = 42 says 42; 43 = 42 says nothing.
    return _SIDE.fullmatch(expression.partition("=")[0]) is not None


def _powers_are_small(expression: str) -> bool:
    exponents = ["".join(groups) for groups in _EXPONENT.findall(expression)]
    digits = sum(letter.isdigit() for exponent in exponents for letter in exponent)
    # A caret the pattern could not read, one inside an exponent or one behind it is a tower or worse.
    readable = len(exponents) == expression.count("^") and not any("^" in exponent for exponent in exponents)
    return readable and digits <= 4 and _STACKED.search(expression) is None


def _depth(expression: str) -> int:
    depth = deepest = 0
    for letter in expression:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    return deepest


@lru_cache(maxsize=4096)
def _verify(prediction: str, truth: str) -> bool:
    library = _math_verify()
    try:
        with _deadline(TIME_LIMIT_S):
            ours, theirs = _parse(library, prediction), _parse(library, truth)
            # Its own limits are whole seconds and refuse to work outside the main thread.
            return bool(ours and theirs) and bool(library.verify(theirs, ours, timeout_seconds=None))
    except (_OutOfTime, RecursionError):
        return False


def _parse(library: Any, expression: str) -> list[Any]:
    targets = [library.LatexExtractionConfig()]
    parsed: list[Any] = library.parse(f"${expression}$", targets, fallback_mode="no_fallback", parsing_timeout=None)
    return parsed


@cache
def _math_verify() -> Any:
    # Imported when first needed: sympy costs a quarter of a second, and only this kind of equality wants it.
    import math_verify

    # It would warn that its own time limits are off.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # The first expression pays for the parser's tables; it must not be a completion whose time is counted.
    math_verify.parse("$x^2+1$", parsing_timeout=None)
    return math_verify


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise `_OutOfTime` after so many seconds of computing; time in which other processes compute does not count.

    Signals reach the main thread only; elsewhere nothing happens.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    over = False

    def ring(_: int, frame: FrameType | None) -> None:
        # What is raised inside a destructor is lost; the next ring is soon.
        if not over and not _is_in_destructor(frame):
            raise _OutOfTime

    previous = signal.signal(signal.SIGPROF, ring)
    remaining, _ = signal.setitimer(signal.ITIMER_PROF, seconds, RING_AGAIN_S)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_PROF, remaining)
        signal.signal(signal.SIGPROF, previous)


def _is_in_destructor(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            return True
        frame = frame.f_back
    return False
