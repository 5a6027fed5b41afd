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
    """(2 K, N) of K tables: numerators and denominators by turns, of the N documents that are defined in all of them.

    Entry i of every table is the same document; tables of different lengths are a ValueError.
    """
    documents = len(tables[0]) if tables else 0
    values_KN2 = np.array(tables, dtype=np.float64).reshape(len(tables), documents, 2)
    bottom_KN = values_KN2[..., 1]
    defined_N = (~np.isnan(values_KN2.sum(-1)) & (bottom_KN != 0)).all(0)
    return values_KN2[:, defined_N].transpose(0, 2, 1).reshape(2 * len(tables), int(defined_N.sum()))
