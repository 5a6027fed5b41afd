"""Where speculation stops paying: the smallest context at which a method is slower than the verifier alone."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bdcore.collapse.boundary import Fall, Point, doubt, fall, skipped
from bdcore.collapse.cells import Cell, series, title, usable
from bdcore.collapse.intervals import MIN_PROMPTS
from bdcore.collapse.words import times


@dataclass(frozen=True)
class SpeedupCollapse:
    """Where the speedup of one series over context falls below 1."""

    method: str
    budget: int
    gamma: int
    setting: str
    status: str
    """`collapsed`: a whole interval is below 1; `likely`: points alone; `not reached`; `insufficient`."""
    certain_from: int | None
    """The boundary: smallest context whose whole interval is below 1, in tokens."""
    below_from: int | None
    """Smallest context whose point is below 1, in tokens."""
    lowest: float | None
    """Lowest speedup over the contexts judged."""
    sentence: str


def speedup_boundaries(
    cells: Iterable[Cell], *, quantity: str = "decode speedup", min_prompts: int = MIN_PROMPTS
) -> list[SpeedupCollapse]:
    """One verdict per method, setting, budget and gamma, over the cells that were timed.

    Unlike acceptance, a speedup has a bound of its own, 1: one context is enough to be judged. `quantity` names in the
    sentences what `Cell.speedup` holds.
    """
    return [_boundary(found, quantity, min_prompts) for found in series(c for c in cells if c.speedup is not None)]


def _boundary(cells: Sequence[Cell], quantity: str, min_prompts: int) -> SpeedupCollapse:
    points = [Point(c.context, c.speedup) for c in cells if c.speedup is not None]
    used = [p for p in points if usable(p.estimate, min_prompts)]
    if not used:
        seen = "; ".join(f"{p.context} tokens: {times(p.estimate)}" for p in points)
        text = f"the {quantity} cannot be judged: no context has {min_prompts} prompts or more ({seen})."
        return _verdict(cells[0], "insufficient", None, text)
    found = fall(used, 1.0)
    status = "collapsed" if found.certain else "likely" if found.below else "not reached"
    return _verdict(cells[0], status, found, f"{_words(found, used, quantity)}{skipped(points, used)}")


def _words(found: Fall, used: Sequence[Point], quantity: str) -> str:
    if found.below is None:
        at = f"at its lowest the {quantity} is {_at(found.lowest)}"
        return f"is never slower than the verifier alone up to {used[-1].context} tokens: {at}."
    again = _again(found, used)
    if found.certain is None:
        at = f"at {found.below.context} tokens: the {quantity} is {times(found.below.estimate)}, below 1"
        return f"is likely slower than the verifier alone {at}, but {doubt(found.below)}.{again}"
    at = f"at {found.certain.context} tokens: the {quantity} is {times(found.certain.estimate)}, below 1"
    earlier = f" The point is below 1 from {found.below.context} tokens." if found.below != found.certain else ""
    return f"is slower than the verifier alone {at}.{earlier}{again}"


def _at(point: Point) -> str:
    return f"{times(point.estimate)} at {point.context} tokens"


def _again(found: Fall, used: Sequence[Point]) -> str:
    """A boundary reads as if everything beyond it were slower too: say where it is not."""
    start = found.certain or found.below
    faster = [p for p in used if start and p.context > start.context and p.value >= 1.0]
    return f" It is not slower at {', '.join(str(p.context) for p in faster)} tokens." if faster else ""


def _verdict(cell: Cell, status: str, found: Fall | None, text: str) -> SpeedupCollapse:
    return SpeedupCollapse(
        cell.method,
        cell.budget,
        cell.gamma,
        cell.setting,
        status,
        found and found.certain and found.certain.context,
        found and found.below and found.below.context,
        found and found.lowest.value,
        f"{title(cell, budget=True)}: {text}",
    )
