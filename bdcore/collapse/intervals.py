"""Ratios of sums with a bootstrap interval over prompts.

Acceptance is sum(accepted) / sum(drafted); a speedup is sum(seconds of `ar`) / sum(seconds of the method). What is
resampled is the prompt, never the round: rounds of one prompt are not independent. With few prompts the intervals are
too narrow: docs/verdicts.md says by how much.

Legend: C columns, N prompts, R resamples.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95
LEVEL = 0.05
"""Below this a p-value counts as evidence."""
RESAMPLES = 2000
# Of n ** n equally likely resamples one repeats the lowest prompt n times. For n = 3 that is 3.7 %, more than the 2.5 %
# an interval leaves out at each end: the interval would be the plain range of the prompts.
MIN_PROMPTS = 4

DRAWN = 2**21
"""Prompts drawn at a time: what bounds the memory of a grid of many prompts."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Statistic = Callable[..., Floats]
"""Of columns with one entry per prompt along `axis`. It must depend on their sums alone."""

_bootstrap: Callable[..., Any] = stats.bootstrap


@dataclass(frozen=True)
class Estimate:
    """A ratio, its interval, and the prompts behind it. None where undefined: a missing interval is never certainty."""

    value: float | None
    low: float | None
    high: float | None
    n: int
    """Prompts that contribute."""
    kind: str | None = None
    """Which bootstrap gave the interval: `BCa`, `percentile` or `basic`."""


def estimate(
    statistic: Statistic,
    columns: Sequence[Floats],
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
    kinds: Sequence[str] = ("BCa", "percentile"),
) -> Estimate:
    """`statistic(*columns)` with the first of the bootstrap intervals `kinds` that is defined.

    Columns have one entry per prompt, and a prompt is drawn with all of them. No interval for fewer than two prompts.
    """
    n = len(columns[0])
    with np.errstate(all="ignore"):
        value = float(statistic(*columns)) if n else np.nan
    if not np.isfinite(value):
        return Estimate(None, None, None, n)
    for kind in kinds if n > 1 else ():
        bounds = _bounds(statistic, columns, kind, confidence, resamples, seed)
        if bounds is not None:
            return Estimate(value, *bounds, n, kind)
    return Estimate(value, None, None, n)


def _bounds(
    statistic: Statistic, columns: Sequence[Floats], kind: str, confidence: float, resamples: int, seed: int
) -> tuple[float, float] | None:
    """The interval, or None where this kind is undefined (BCa: no bias or acceleration; 0 / 0), or has no width."""
    n, sums = len(columns[0]), totals(columns)

    def resampled(drawn: Ints, axis: int = -1) -> Floats:
        return statistic(*sums(drawn, axis)[..., None], axis=-1)

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        result = _bootstrap(
            (np.arange(n),),
            resampled,
            vectorized=True,
            n_resamples=resamples,
            confidence_level=confidence,
            method=kind,
            batch=max(1, DRAWN // n),
            rng=np.random.default_rng(seed),
        )
    low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
    return (low, high) if np.isfinite([low, high]).all() and high - low > 1e-12 else None


def totals(columns: Sequence[Floats]) -> Callable[[Ints, int], Floats]:
    """What turns drawn prompts (..., N) into the sums (C, ...) of C columns over them.

    How often each prompt was drawn, times the columns, is one product for them all: far faster than gathering entries.
    """
    n, table_NC = len(columns[0]), np.stack([*columns], axis=1)

    def summed(drawn: Ints, axis: int = -1) -> Floats:
        drawn_RN = drawn.reshape(-1, drawn.shape[axis])
        places = drawn_RN + n * np.arange(len(drawn_RN))[:, None]
        times_RN = np.bincount(places.ravel(), minlength=n * len(drawn_RN)).reshape(-1, n)
        return (times_RN.astype(np.float64) @ table_NC).T.reshape(-1, *drawn.shape[:-1])

    return summed
