"""Ratios of sums with a bootstrap interval over prompts.

Acceptance is sum(accepted) / sum(drafted); a speedup is sum(seconds of `ar`) / sum(seconds of the method). What is
resampled is the prompt, never the round: rounds of one prompt are not independent.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

CONFIDENCE = 0.95
RESAMPLES = 2000

Floats = NDArray[np.float64]

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
    """Which bootstrap gave the interval: `BCa` or `percentile`."""


def ratio_of_sums(
    numerators: Sequence[float | None],
    denominators: Sequence[float | None],
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """sum(numerators) / sum(denominators), one pair per prompt, with its bootstrap interval.

    Pairs with a None, and pairs of two zeros (a prompt that drafted nothing), add nothing and are not counted in `n`.
    """
    pairs = [
        (float(a), float(b))
        for a, b in zip(numerators, denominators, strict=True)
        if a is not None and b is not None and (a or b)
    ]
    top = np.array([a for a, _ in pairs], dtype=np.float64)
    bottom = np.array([b for _, b in pairs], dtype=np.float64)
    if float(bottom.sum()) == 0.0:
        return Estimate(None, None, None, len(pairs))
    value = float(top.sum() / bottom.sum())
    if len(pairs) < 2 or _no_spread(top, bottom):
        return Estimate(value, None, None, len(pairs))
    for kind in ("BCa", "percentile"):
        bounds = _bounds(top, bottom, kind, confidence, resamples, seed)
        if bounds is not None:
            return Estimate(value, *bounds, len(pairs), kind)
    return Estimate(value, None, None, len(pairs))


def _no_spread(top: Floats, bottom: Floats) -> bool:
    """Every prompt has the pooled ratio: resampling cannot see how far the next prompt would be from it."""
    return bool(np.allclose(top * bottom.sum(), bottom * top.sum(), rtol=1e-9, atol=0.0))


def _ratio(top: Floats, bottom: Floats, axis: int = -1) -> Floats:
    return top.sum(axis=axis) / bottom.sum(axis=axis)


def _bounds(
    top: Floats, bottom: Floats, kind: str, confidence: float, resamples: int, seed: int
) -> tuple[float, float] | None:
    """The interval, or None where this kind of bootstrap is undefined (BCa: no bias or acceleration; 0 / 0)."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        result = _bootstrap(
            (top, bottom),
            _ratio,
            paired=True,
            vectorized=True,
            n_resamples=resamples,
            confidence_level=confidence,
            method=kind,
            rng=np.random.default_rng(seed),
        )
    low, high = float(result.confidence_interval.low), float(result.confidence_interval.high)
    return (low, high) if np.isfinite([low, high]).all() and low < high else None
