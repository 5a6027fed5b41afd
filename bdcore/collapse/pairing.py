"""Two ratios of sums over the same documents: their difference and their quotient, with a paired bootstrap interval.

A document is drawn with both its pairs, so what makes it easy or hard for both cancels out.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from bdcore.collapse.intervals import CONFIDENCE, RESAMPLES, Estimate

Floats = NDArray[np.float64]
Sums = tuple[float | None, float | None]
"""Numerator and denominator of one document, such as accepted and drafted tokens."""
Statistic = Callable[..., Floats]

_bootstrap: Callable[..., Any] = stats.bootstrap


def difference(
    first: Sequence[Sums], second: Sequence[Sums], *, confidence: float = CONFIDENCE, resamples: int = RESAMPLES
) -> Estimate:
    """sum / sum of `first` minus that of `second`; entry i of both is the same document.

    Documents where either is undefined (a None, or a denominator of 0) are left out. No interval for fewer than two.
    """
    return _paired(_difference, first, second, confidence, resamples)


def quotient(
    first: Sequence[Sums], second: Sequence[Sums], *, confidence: float = CONFIDENCE, resamples: int = RESAMPLES
) -> Estimate:
    """sum / sum of `first` relative to that of `second`, as `difference`; undefined where that of `second` is 0."""
    return _paired(_quotient, first, second, confidence, resamples)


def _difference(a: Floats, b: Floats, c: Floats, d: Floats, axis: int = -1) -> Floats:
    return a.sum(axis) / b.sum(axis) - c.sum(axis) / d.sum(axis)


def _quotient(a: Floats, b: Floats, c: Floats, d: Floats, axis: int = -1) -> Floats:
    return a.sum(axis) / b.sum(axis) / (c.sum(axis) / d.sum(axis))


def _paired(
    statistic: Statistic, first: Sequence[Sums], second: Sequence[Sums], confidence: float, resamples: int
) -> Estimate:
    table = [
        (a, b, c, d)
        for (a, b), (c, d) in zip(first, second, strict=True)
        if a is not None and c is not None and b and d
    ]
    if not table:
        return Estimate(None, None, None, 0)
    columns = tuple(np.array(table, dtype=np.float64).T)
    with np.errstate(all="ignore"):
        value = float(statistic(*columns))
    if not np.isfinite(value):
        return Estimate(None, None, None, len(table))
    for kind in ("BCa", "percentile") if len(table) > 1 else ():
        bounds = _bounds(statistic, columns, kind, confidence, resamples)
        if bounds is not None:
            return Estimate(value, *bounds, len(table), kind)
    return Estimate(value, None, None, len(table))


def _bounds(
    statistic: Statistic, columns: tuple[Floats, ...], kind: str, confidence: float, resamples: int
) -> tuple[float, float] | None:
    """The interval, or None where this kind is undefined, or documents that all agree leave it without width."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        result = _bootstrap(
            columns,
            statistic,
            paired=True,
            vectorized=True,
            n_resamples=resamples,
            confidence_level=confidence,
            method=kind,
            rng=np.random.default_rng(0),
        )
    low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
    return (low, high) if np.isfinite([low, high]).all() and high - low > 1e-12 else None
