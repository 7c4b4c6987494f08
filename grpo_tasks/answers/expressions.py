r"""Mathematical equality through math-verify and sympy. Only text that passes a whitelist is parsed.

math-verify looks for the last expression anywhere in a text and hands it to sympy, which computes whatever is written: 9**9**9
would run for ever. So the whole answer must be one expression of at most 200 characters and known commands (no sums, integrals,
factorials or limits), with brackets at most six deep, four digits in all exponents together and no power of a power; no listing
(`42 43` would be read as a mixed number) and no chain of equations.

A unit in \text{} or a percent sign at the end is dropped, and so are spaces between digits (10\,000). Words that change the value
or leave it open are no unit (`3\text{ or so}`, `3\text{ million}`). `x \approx 11` states the result 11. Variables in another
case are other variables: X is not x. Decimals are exact, but for the rule of numerals.py: 0.333333 = 1/3, 0.50000001 is not 1/2.

Several solutions (`21 or 11`, `x = 21 and x = 11`, `\{11, 21\}`, `1, 2`) equal as many solutions in any order; a listing equals
no single value, not even `3, 3` the value 3. Ordered pairs and intervals keep their order.

The comparison then gets two seconds of computing time (a signal, so in the main thread only; in any other thread the bounds alone
protect). The longest answers within the bounds take an eighth of a second on a free core: a busy one changes no reward.
"""

import logging
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import cache, lru_cache
from types import FrameType
from typing import Any

from grpo_tasks.answers.extraction import nesting
from grpo_tasks.answers.numerals import rounding, unwrap

MAX_EXPRESSION_CHARS = 200
MAX_DEPTH = 6
"""Deepest nesting of brackets. The parser's time grows steeply with it."""
MAX_SOLUTIONS = 8
"""Longer lists of solutions are never equal."""
MAX_EXPONENT_DIGITS = 4
"""Digits in all exponents together."""
TIME_LIMIT_S = 2.0
"""Computing time of one comparison, in seconds."""
REPEAT_SIGNAL_S = 0.1
"""Computing time in seconds between two signals once the limit is reached: an exception inside a destructor is lost."""

_FIRST_COMPARISONS = (("(x+1)^2", "x^2+2x+1"), (r"\sin(x)^2+\cos(x)^2", "1"), ("[1,2)", "[1,2)"))
_KNOWN_COMMAND = re.compile(
    r"[dtc]?frac|sqrt|pi|cdot|times|div|pm|left|right|infty|cup|cap|in|leq?|geq?|lt|gt|neq?|(?:arc)?(?:sin|cos|tan)|cot|sec|csc"
    r"|ln|log|circ|degree|theta|alpha|beta|gamma|lambda|mu|omega|phi|begin|end|quad"
)
_KNOWN_WORD = re.compile(r"sqrt|arcsin|arccos|arctan|[pb]matrix")
_COMMAND = re.compile(r"\\([A-Za-z]+)")
_WORD = re.compile(r"[A-Za-z]{4,}")
_UNIT = re.compile(r"\\(?:text|mathrm)\{(?P<words>[^{}0-9]*)\}$|(?<=[0-9])\s*(?:per ?cent|\\?%)$")
_UNIT_WORDS = re.compile(r"[^\W\d_]+(?:[\s./'°²³·-]+[^\W\d_]+){0,4}[.²³]*|[°$€£¥₹]\w?|\\?%|")
_NO_UNIT = re.compile(
    r"\b(?:or|and|so|not?|to|than|up|if|but|is|are|it|i|think|guess|about|around|roughly|approx(?:imately)?|nearly|almost|maybe|perhaps"
    r"|possibly|probably|likely|more|less|fewer|least|most|over|under|above|below|plus|minus|times|else|other|either|neither|each"
    r"|(?:hundred|thousand|million|billion|trillion|dozen)s?|half|double|twice|k)\b",
    re.IGNORECASE,
)
"""Words that change the value before them, or leave it open."""
_THIN_SPACE = re.compile(r"\\[,;:!]|[\u2009\u202f\u00a0]")
_GROUPED_DIGITS = re.compile(r"(?<=[0-9])(?:\\[,!]|\{,\}|[\u2009\u202f\u00a0])(?=[0-9]{3}(?![0-9]))")
_APPROXIMATELY = re.compile(r"\\approx(?![A-Za-z])|\u2248")
_JOIN_IN_TEXT = re.compile(r"\\(?:text|mathrm)\{\s*(or|and)\s*\}")
_JOIN = re.compile(r"\s+(?:or|and)\s+")
# A comma before three digits may group them: 1,234.
_SEPARATOR = re.compile(r"\s*(?:\s(?:or|and)\s|;|,(?![0-9]{3}(?![0-9])))\s*")
_SET = re.compile(r"(?:\\left)?\\\{(.*?)(?:\\right)?\\\}", re.DOTALL)
_STACKED = re.compile(r"\^\s*(?:\{[^{}]*\}|\([^()]*\)|\\?[A-Za-z0-9]+)\s*\^")
_EXPONENT = re.compile(r"\^\s*(?:\{([^{}]*)\}|\(([^()]*)\)|(\\?[A-Za-z0-9]+))")
_NUMBERS_SIDE_BY_SIDE = re.compile(r"[0-9.]\s+[0-9.]")
_LISTS = re.compile(r",(?![0-9]{3}(?![0-9]))|;")
_RELATION = re.compile(r"[<>≤≥≠∈]|\\(?:leq?|geq?|lt|gt|neq?|in)(?![A-Za-z])")
_LETTER = re.compile(r"\\[A-Za-z]+|[A-Za-z]")
_FREE_LETTERS = "abcghjklmnopqrstuvwxyz"
"""Names for variables that occur in both cases: without those that sympy reads as a constant, a differential or a function."""
_SIDE = re.compile(r"\s*(?:[A-Za-z]|\\[A-Za-z]+)\s*(?:\([A-Za-z]\)\s*)?")


class _OutOfTime(BaseException):
    """The comparison took too long. Not an `Exception`: sympy catches those when it tries one algorithm after another."""


def expressions_equal(prediction: str, truth: str) -> bool:
    """Whether two LaTeX or plain expressions are mathematically equal; False when one is refused or takes too long."""
    if max(len(prediction), len(truth)) > MAX_EXPRESSION_CHARS:
        return False
    ours, theirs = _plain(prediction), _plain(truth)
    solutions, wanted = _solutions(ours), _solutions(theirs)
    named = "=" in ours + theirs
    if min(len(solutions), len(wanted)) > 1 and (_is_unordered(ours) or _is_unordered(theirs) or not named):
        # Each solution of one side equals exactly one of the other's.
        all_harmless = all(one and is_harmless(one) for one in [*solutions, *wanted])
        return len(solutions) == len(wanted) <= MAX_SOLUTIONS and all_harmless and _compare(solutions, wanted)
    lists = [_LISTS.search(one) is not None for one in (ours, theirs)]
    # A list is no single value. An interval may be written as a relation: [1,2) and 1 <= x < 2.
    is_one_of_a_list = lists[0] != lists[1] and _RELATION.search(theirs if lists[0] else ours) is None
    if _JOIN.search(ours) or _JOIN.search(theirs) or is_one_of_a_list:
        return False
    if not (is_harmless(ours) and is_harmless(theirs)) or ("=" in ours and "=" not in theirs and not _names_result(ours)):
        return False
    return _compare((ours,), (theirs,))


def is_harmless(expression: str) -> bool:
    """Whether sympy may see an expression: known words and commands, no listing, no power that could grow large."""
    commands = _COMMAND.findall(expression)
    letters = _COMMAND.sub(" ", expression)
    return (
        all(_KNOWN_COMMAND.fullmatch(command) for command in commands)
        and all(_KNOWN_WORD.fullmatch(word) for word in _WORD.findall(letters))
        and not any(sign in letters for sign in "!$\n\r;&#~" if sign != "&" or "begin" not in commands)
        and _NUMBERS_SIDE_BY_SIDE.search(letters) is None
        and letters.count("=") <= 1
        and nesting(letters, "([{", ")]}") <= MAX_DEPTH
        and _powers_are_small(expression)
    )


def _plain(text: str) -> str:
    text = _JOIN_IN_TEXT.sub(r" \1 ", _GROUPED_DIGITS.sub("", unwrap(text)))
    text = _APPROXIMATELY.sub("=", _THIN_SPACE.sub(" ", text)).replace("\\cfrac", "\\frac")
    return _without_unit(text.strip()).replace("**", "^").replace("\u2212", "-").strip()


def _without_unit(text: str) -> str:
    found = _UNIT.search(text)
    if found is None:
        return text
    words = (found["words"] or "").strip("\\ \t~")
    is_unit = _UNIT_WORDS.fullmatch(words) and not _NO_UNIT.search(words)
    return text[: found.start()] if is_unit else text


def _is_unordered(expression: str) -> bool:
    return _SET.fullmatch(expression) is not None or _JOIN.search(expression) is not None


def _solutions(expression: str) -> list[str]:
    """The parts of a list or set of solutions, without the name of the unknown; brackets inside are not taken apart."""
    inside = _SET.fullmatch(expression)
    text, parts, depth, index, start = inside[1] if inside else expression, [], 0, 0, 0
    while index < len(text):
        depth += (text[index] in "([{") - (text[index] in ")]}")
        found = _SEPARATOR.match(text, index) if depth == 0 else None
        if found:
            parts.append(text[start : found.start()])
            start = found.end()
        index = max(index + 1, found.end() if found else 0)
    return [_without_unit(_result(part.strip())) for part in [*parts, text[start:]]]


def _result(solution: str) -> str:
    return solution.partition("=")[2].strip() if solution.count("=") == 1 and _names_result(solution) else solution


def _names_result(expression: str) -> bool:
    # "x = 42" states the result 42. "43 = 42" states none.
    return _SIDE.fullmatch(expression.partition("=")[0]) is not None


def _powers_are_small(expression: str) -> bool:
    exponents = ["".join(groups) for groups in _EXPONENT.findall(expression)]
    digits = sum(letter.isdigit() for exponent in exponents for letter in exponent)
    # A caret that the pattern cannot read, or one inside or right after an exponent, may be a tower of powers.
    readable = len(exponents) == expression.count("^") and not any("^" in exponent for exponent in exponents)
    return readable and digits <= MAX_EXPONENT_DIGITS and _STACKED.search(expression) is None


def _compare(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    """`_verify` of expressions whose variables differ in more than their case: the parser reads X as x."""
    letters = {letter for text in (*ours, *theirs) for letter in _LETTER.findall(text) if len(letter) == 1}
    both = sorted(letter for letter in letters if letter.isupper() and letter.lower() in letters)
    free = [letter for letter in _FREE_LETTERS if not {letter, letter.upper()} & letters]
    if len(free) < len(both):
        return False
    names = dict(zip(both, free, strict=False))
    left, right = (
        tuple(_LETTER.sub(lambda found: names.get(found[0], found[0]), text) for text in side) for side in (ours, theirs)
    )
    return _verify(left, right)


@lru_cache(maxsize=4096)
def _verify(predictions: tuple[str, ...], truths: tuple[str, ...]) -> bool:
    """Whether as many expressions on each side are equal in some order."""
    library = _math_verify()

    def same(ours: tuple[str, list[Any]], wanted: tuple[str, list[Any]]) -> bool:
        """Of two parsed expressions, each with its text."""
        if not (ours[1] and wanted[1]):
            return False
        allowed = rounding(_result(ours[0]), _result(wanted[0]))
        one, other = (_value(ours[1][0]), _value(wanted[1][0])) if allowed else (None, None)
        if one is not None and other is not None:
            return abs(one - other) <= allowed
        # math-verify's own time limits are whole seconds and fail outside the main thread, so they are off.
        return bool(library.verify(wanted[1], ours[1], timeout_seconds=None))

    try:
        with _deadline(TIME_LIMIT_S):
            left = [(prediction, _parse(library, prediction)) for prediction in predictions]
            for truth in truths:
                wanted = truth, _parse(library, truth)
                found = next((ours for ours in left if same(ours, wanted)), None)
                if found is None:
                    return False
                left = [ours for ours in left if ours is not found]
            return True
    except (_OutOfTime, RecursionError):
        return False


def _parse(library: Any, expression: str) -> list[Any]:
    """The expression as sympy has it, its decimals as fractions: math-verify would round them all to six digits."""
    import sympy

    targets = [library.LatexExtractionConfig()]
    parsed = library.parse(f"${expression}$", targets, fallback_mode="no_fallback", parsing_timeout=None)
    return [one.xreplace({real: sympy.Rational(str(real)) for real in one.atoms(sympy.Float)}) for one in parsed]


def _value(expression: Any) -> Fraction | None:
    """The value of a real number, or of a named one (`x = 2`), to 40 digits; None for anything else."""
    number = getattr(expression, "rhs", expression)
    if not (getattr(number, "is_number", False) and number.is_real):
        return None
    found = number.evalf(40)
    return Fraction(str(found)) if found.is_Float or found.is_Rational else None


@cache
def _math_verify() -> Any:
    # Imported on first use: sympy takes a quarter of a second to import, and only this kind of equality needs it.
    import math_verify

    # It warns on every call that its own time limits are off.
    for name in ("math_verify.parser", "math_verify.grader"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    # The first comparisons build tables and import much of sympy. Done here, this does not count against the time of a
    # completion: on a cold machine the first right answer of a run would count as wrong.
    for left, right in _FIRST_COMPARISONS:
        math_verify.verify(_parse(math_verify, left), _parse(math_verify, right), timeout_seconds=None)
    return math_verify


@contextmanager
def _deadline(seconds: float) -> Iterator[None]:
    """Raise `_OutOfTime` after this much computing time of the process; time spent waiting for a core does not count."""
    # Python delivers signals to the main thread only.
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    over = False

    def expire(_: int, frame: FrameType | None) -> None:
        # Python discards an exception raised inside a destructor. The timer fires again soon.
        while frame is not None and frame.f_code.co_name != "__del__":
            frame = frame.f_back
        if not over and frame is None:
            raise _OutOfTime

    previous = signal.signal(signal.SIGPROF, expire)
    remaining, _ = signal.setitimer(signal.ITIMER_PROF, seconds, REPEAT_SIGNAL_S)
    try:
        yield
    finally:
        over = True
        signal.setitimer(signal.ITIMER_PROF, remaining)
        signal.signal(signal.SIGPROF, previous)
