"""The best layout for every number of cards, and the number from which more cards stop helping."""

from collections.abc import Sequence
from dataclasses import dataclass

from schemas.errors import ConfigError
from tests.benchmarks.scale.model import Forecast, Layout, ScaleModel, cards_of

COUNTS = tuple(2**power for power in range(10))
"""Numbers of cards that are tried: 1 to 512."""
MOST_CARDS = COUNTS[-1]
WORTH = 1.2
"""Twice as many cards are worth it if an update takes less time by this factor."""


@dataclass(frozen=True, slots=True)
class Point:
    """The best that can be done with a number of cards."""

    cards: int
    """Cards that are there; the layout may use fewer."""
    best: Forecast | None
    """None: the workload does not fit on so few cards."""


def sweep(model: ScaleModel, counts: Sequence[int] = COUNTS) -> list[Point]:
    """The fastest layout for each number of cards."""
    return [Point(cards, best_layout(model, cards)) for cards in counts]


def best_layout(model: ScaleModel, cards: int) -> Forecast | None:
    """The fastest layout with at most so many cards, the one with the fewest cards among equals; None if none fits."""
    found: list[Forecast] = []
    for layout in _layouts(model, cards):
        try:
            found.append(model.forecast(layout))
        except ConfigError:
            continue
    return min(found, key=lambda one: (one.step_s, one.cards), default=None)


def saturated(points: Sequence[Point]) -> Forecast | None:
    """The forecast from which on no doubling of the cards is `WORTH` it; None if nothing fits."""
    fitting = [point.best for point in points if point.best is not None]
    last = len(fitting) - 1
    while last > 0 and fitting[last - 1].step_s < WORTH * fitting[last].step_s:
        last -= 1
    return fitting[last] if fitting else None


def _layouts(model: ScaleModel, cards: int) -> list[Layout]:
    work = model.work
    if not work.served:
        # Without servers, all processes do both; more of them than prompts leave some without any to sample.
        return [Layout(trainers, 0) for trainers in _tried(min(cards, work.completions))]
    if cards == 1:
        # One server that shares the card of the trainer.
        return [Layout(1, 0)]
    tensor = work.tensor_parallel
    replicas = _tried(min((cards - 1) // tensor, work.prompts))
    layouts = []
    for count in replicas:
        most = min(cards - count * tensor, work.completions)
        layouts += [Layout(trainers, count) for trainers in _tried(most)]
    return [layout for layout in layouts if cards_of(layout, work) <= cards]


def _tried(most: int) -> list[int]:
    """Numbers up to `most` that are tried: 1, 2, 3, 4, 6, 8, 12, ..., and `most` itself."""
    steps = {2**power * odd for power in range(10) for odd in (1, 3, 5, 7)}
    return sorted({number for number in steps if number < most} | ({most} if most > 0 else set()))
