"""Where a series over context lies below a bound, by its points and by its whole intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from bdcore.collapse.intervals import Estimate


class Point(NamedTuple):
    context: int
    """Tokens."""
    estimate: Estimate

    @property
    def value(self) -> float:
        return self.estimate.value or 0.0


@dataclass(frozen=True)
class Fall:
    """Each is the one at the smallest context, or None where there is none."""

    below: Point | None
    """The point is below the bound."""
    certain: Point | None
    """The whole interval is below the bound: never a point without interval."""
    lowest: Point
    """The lowest value of all."""


def fall(points: Sequence[Point], bound: float) -> Fall:
    """`points` by context, at least one."""
    below = [p for p in points if p.value < bound]
    certain = [p for p in below if p.estimate.high is not None and p.estimate.high < bound]
    return Fall(next(iter(below), None), next(iter(certain), None), min(points, key=lambda p: p.value))


def doubt(point: Point) -> str:
    """Why a point below the bound is not certain."""
    return "there is no interval" if point.estimate.high is None else "the interval reaches above it"


def skipped(points: Sequence[Point], used: Sequence[Point]) -> str:
    """The contexts that could not be judged, as a sentence to append."""
    left_out = [str(p.context) for p in points if p not in used]
    return f" Too few prompts to judge {', '.join(left_out)} tokens." if left_out else ""
