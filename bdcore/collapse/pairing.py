"""Ratios of sums over the same documents: their difference and their quotient, with a paired bootstrap interval.

A document is drawn with all its pairs, so what makes it easy or hard for all of them cancels out.
"""

from collections.abc import Sequence

import numpy as np

from bdcore.collapse.intervals import CONFIDENCE, RESAMPLES, Estimate, Floats, Statistic, estimate
from bdcore.collapse.ratios import ratio_of_sums

Sums = tuple[float | None, float | None]
"""Numerator and denominator of one document, such as accepted and drafted tokens."""


def pooled(sums: Sequence[Sums]) -> Estimate:
    """sum / sum over the documents of one setting: `ratio_of_sums` of their pairs."""
    return ratio_of_sums([top for top, _ in sums], [bottom for _, bottom in sums])


def difference(
    first: Sequence[Sums], second: Sequence[Sums], *, confidence: float = CONFIDENCE, resamples: int = RESAMPLES
) -> Estimate:
    """sum / sum of `first` minus that of `second`; entry i of both is the same document.

    Documents where either is undefined (a None, or a denominator of 0) are left out. No interval for fewer than two.
    """
    return paired(_difference, first, second, confidence=confidence, resamples=resamples)


def quotient(
    first: Sequence[Sums], second: Sequence[Sums], *, confidence: float = CONFIDENCE, resamples: int = RESAMPLES
) -> Estimate:
    """sum / sum of `first` relative to that of `second`, as `difference`; undefined where that of `second` is 0."""
    return paired(_quotient, first, second, confidence=confidence, resamples=resamples)


def _difference(a: Floats, b: Floats, c: Floats, d: Floats, axis: int = -1) -> Floats:
    return a.sum(axis) / b.sum(axis) - c.sum(axis) / d.sum(axis)


def _quotient(a: Floats, b: Floats, c: Floats, d: Floats, axis: int = -1) -> Floats:
    return a.sum(axis) / b.sum(axis) / (c.sum(axis) / d.sum(axis))


def paired(
    statistic: Statistic, *tables: Sequence[Sums], confidence: float = CONFIDENCE, resamples: int = RESAMPLES
) -> Estimate:
    """`statistic` of numerators and denominators by turns, table after table, over documents defined in all tables."""
    return estimate(statistic, tuple(complete(*tables)), confidence=confidence, resamples=resamples)


def complete(*tables: Sequence[Sums]) -> Floats:
    """(2 * tables, documents): numerators and denominators by turns, of the documents that are defined in all tables.

    Entry i of every table is the same document; tables of different lengths are a ValueError.
    """
    rows = [
        [value for sums in document for value in sums]
        for document in zip(*tables, strict=True)
        if all(top is not None and bottom for top, bottom in document)
    ]
    return np.array(rows, dtype=np.float64).reshape(len(rows), 2 * len(tables)).T
