"""Ratios of sums with a bootstrap interval over prompts.

Acceptance is sum(accepted) / sum(drafted); a speedup is sum(seconds of `ar`) / sum(seconds of the method). What is
resampled is the prompt, never the round: rounds of one prompt are not independent. With few prompts the intervals are
too narrow: docs/verdicts.md says by how much.

Legend: C columns, N prompts, R resamples.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
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
"""Prompts at a time in a jackknife: what bounds the memory of a grid of many prompts."""

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Statistic = Callable[..., Floats]
"""Of columns with one entry per prompt along `axis`. It must depend on their sums alone."""
OfSums = Callable[[Floats], Floats]
"""A statistic of the sums (C, ...) of all columns."""

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

    def of_sums(sums: Floats) -> Floats:
        return statistic(*sums[..., None], axis=-1)

    drawn = resampled(of_sums, columns, resamples=resamples, seed=seed)
    low, high = map(float, ends(of_sums, columns, drawn, kind, confidence=confidence))
    return (low, high) if np.isfinite([low, high]).all() and high - low > 1e-12 else None


@lru_cache(maxsize=8)
def draws(n: int, resamples: int, seed: int) -> Floats:
    """(R, N): how often each resample draws each prompt. The same for every cell of as many prompts, so drawn once."""
    places_RN = np.random.default_rng(seed).integers(n, size=(resamples, n)) + n * np.arange(resamples)[:, None]
    counts_RN = np.bincount(places_RN.ravel(), minlength=n * resamples).reshape(-1, n).astype(np.float64)
    counts_RN.flags.writeable = False
    return counts_RN


def resampled(of_sums: OfSums, columns: Sequence[Floats], *, resamples: int, seed: int) -> Floats:
    """(..., R): the bootstrap distribution of a statistic of sums over prompts; one product for all columns."""
    with np.errstate(all="ignore"):
        return of_sums((draws(len(columns[0]), resamples, seed) @ np.stack([*columns], axis=1)).T)


def ends(
    of_sums: OfSums, columns: Sequence[Floats], drawn: Floats, kind: str, *, confidence: float = CONFIDENCE
) -> tuple[Floats, Floats]:
    """Both ends (...) of scipy's interval of this kind for a bootstrap distribution `drawn` (..., R)."""
    n, sums = len(columns[0]), _totals(columns)

    def of_indices(indices: Ints, axis: int = -1) -> Floats:
        return of_sums(sums(indices, axis))

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        interval = _bootstrap(
            (np.arange(n),),
            of_indices,  # for the value itself and the jackknife of BCa
            vectorized=True,
            n_resamples=0,
            bootstrap_result=SimpleNamespace(bootstrap_distribution=drawn),
            confidence_level=confidence,
            method=kind,
            batch=max(1, DRAWN // n),
        ).confidence_interval
    return interval.low, interval.high


def _totals(columns: Sequence[Floats]) -> Callable[[Ints, int], Floats]:
    """What turns indices of prompts (..., N or N - 1) into the sums (C, ...) of C columns over them.

    scipy asks for all prompts, and for the jackknife of BCa: all but one, which takes a subtraction and no sum.
    """
    n, table_CN = len(columns[0]), np.stack([*columns])
    total_C = table_CN.sum(1)

    def summed(indices: Ints, axis: int = -1) -> Floats:
        whole = indices.sum(axis)
        each = total_C.reshape(-1, *[1] * whole.ndim)
        if indices.shape[axis] == n:
            return np.broadcast_to(each, (len(columns), *whole.shape))
        return each - table_CN[:, n * (n - 1) // 2 - whole]

    return summed
