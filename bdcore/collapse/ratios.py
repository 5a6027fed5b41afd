"""Ratios of sums over prompts with their intervals, many of them from the same resamples.

Legend: R resamples, N prompts, K ratios.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bdcore.collapse.intervals import CONFIDENCE, RESAMPLES, Estimate, Floats, ends, resampled

_TOGETHER = 256
"""Ratios that share their resamples: what bounds the memory of a grid of many cells."""
Values = Sequence[float | None] | NDArray[Any]
"""One per prompt, None or masked where undefined."""


def ratio_of_sums(
    numerators: Values,
    denominators: Values,
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """sum(numerators) / sum(denominators), one pair per prompt, with its bootstrap interval.

    Pairs with a None, and pairs of two zeros (a prompt that drafted nothing), add nothing and are not counted in `n`.
    """
    return ratios_of_sums([(numerators, denominators)], confidence=confidence, resamples=resamples, seed=seed)[0]


def ratios_of_sums(
    ratios: Sequence[tuple[Values, Values]],
    *,
    confidence: float = CONFIDENCE,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> list[Estimate]:
    """`ratio_of_sums` of each (numerators, denominators): the same estimates, drawn once for ratios of equally many
    prompts. Over 800 prompts that makes a hundred of them forty times as fast.
    """
    sums = [_pairs(*ratio) for ratio in ratios]
    found = [_point(*pair) for pair in sums]
    equal: dict[int, list[int]] = defaultdict(list)
    for i, (estimate, pair) in enumerate(zip(found, sums, strict=True)):
        if estimate.value is not None and estimate.n > 1 and not _no_spread(*pair):
            equal[estimate.n].append(i)
    for group in equal.values():
        for some in (group[start : start + _TOGETHER] for start in range(0, len(group), _TOGETHER)):
            bounds = _bounds([sums[i] for i in some], confidence, resamples, seed)
            for i, (low, high, kind) in zip(some, bounds, strict=True):
                found[i] = replace(found[i], low=low, high=high, kind=kind)
    return found


def _pairs(numerators: Values, denominators: Values) -> tuple[Floats, Floats]:
    """What contributes to a ratio: two arrays (N,)."""
    top_N, bottom_N = _floats(numerators), _floats(denominators)
    counted_N = ~np.isnan(top_N + bottom_N) & ((top_N != 0) | (bottom_N != 0))
    return top_N[counted_N], bottom_N[counted_N]


def _floats(values: Values) -> Floats:
    """NaN for None and for what is masked."""
    return np.ma.filled(np.asanyarray(values, dtype=np.float64), np.nan)


def _point(top_N: Floats, bottom_N: Floats) -> Estimate:
    below = float(bottom_N.sum())
    return Estimate(None if below == 0.0 else float(top_N.sum() / below), None, None, len(top_N))


def _no_spread(top_N: Floats, bottom_N: Floats) -> bool:
    """Every prompt has the pooled ratio: resampling cannot see how far the next prompt would be from it."""
    return bool(np.allclose(top_N * bottom_N.sum(), bottom_N * top_N.sum(), rtol=1e-9, atol=0.0))


def _bounds(
    pairs: Sequence[tuple[Floats, Floats]], confidence: float, resamples: int, seed: int
) -> list[tuple[float | None, float | None, str | None]]:
    """The interval of each ratio and its kind: BCa, percentile where that is undefined (no bias or acceleration), or
    none (a resample of 0 / 0).
    """
    k, columns = len(pairs), [*(top for top, _ in pairs), *(bottom for _, bottom in pairs)]

    def of_sums(sums: Floats) -> Floats:
        return sums[:k] / sums[k:]

    drawn_KR = resampled(of_sums, columns, resamples=resamples, seed=seed)
    found: list[tuple[float | None, float | None, str | None]] = [(None, None, None)] * k
    for kind in ("BCa", "percentile"):
        open_ = [i for i, (low, *_) in enumerate(found) if low is None]
        if open_:
            bounds = ends(of_sums, columns, drawn_KR, kind, confidence=confidence)
            for i in open_:
                low, high = (float(end[i]) for end in bounds)
                if _legal(low, high):
                    found[i] = low, high, kind
    return found


def _legal(low: float, high: float) -> bool:
    return bool(np.isfinite([low, high]).all()) and low < high
