"""Do two drafters differ on the same documents? A permutation test: under the null, who is who is a coin toss."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from scipy import stats

from bdcore.collapse.intervals import LEVEL, MIN_PROMPTS, Floats, Statistic
from bdcore.collapse.pairing import Sums, complete
from bdcore.collapse.words import probability

RESAMPLES = 9999
"""2 ** 13 swaps are fewer: the test is exact up to 13 documents."""
RANDOM = 1999
"""Swaps drawn where there are too many to try them all."""

_permutation_test: Callable[..., Any] = stats.permutation_test
_monte_carlo_test: Callable[..., Any] = stats.monte_carlo_test


@dataclass(frozen=True)
class Permutation:
    """The difference of two ratios of sums and how often swapping within documents makes one as large."""

    status: str
    """`different`: the p-value is below the level; `no evidence`; `insufficient`."""
    difference: float | None
    """Of the first to the second."""
    p_value: float | None
    """Two-sided."""
    n: int
    """Documents that both drafted on."""
    smallest: float | None
    """The smallest p-value these documents can give: 2 ** (1 - m) when exact, m of them with different sums."""
    exact: bool
    """Every swap was tried, instead of a random sample of them."""
    sentence: str


def permutation_test(
    first: Sequence[Sums],
    second: Sequence[Sums],
    *,
    names: tuple[str, str] = ("the first", "the second"),
    level: float = LEVEL,
    min_prompts: int = MIN_PROMPTS,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Permutation:
    """Paired two-sided permutation test of sum / sum; entry i of both is the same document.

    A document's pairs (accepted, drafted) trade places as a whole, which is a sign-flip test that also holds for ratios
    of sums. Documents where either is undefined are left out. Above `resamples` swaps
    a random sample of them is drawn, and p is never 0.
    """
    table = complete(first, second)
    n = table.shape[1]
    if n < min_prompts:
        least = f" With {n} documents no p-value below {_smallest(n):.3g} is possible." if n else ""
        text = f"{names[0]} and {names[1]} cannot be compared: {n} of the {min_prompts} documents needed.{least}"
        return Permutation("insufficient", None, None, n, _smallest(n) if n else None, True, text)
    exact, sums = 2**n <= resamples, table.sum(-1)
    tried = resamples if exact else min(resamples, RANDOM)
    swapped_N2 = (table[2:] - table[:2]).T  # what a swap adds to the first's sums and takes from the second's

    def gap(swapped: Floats, _: Floats | None = None, axis: int = -1) -> Floats:
        # Of 0s and 1s, not of the sums: scipy swaps single numbers, and a ratio of sums needs two.
        top, bottom = np.moveaxis(swapped @ swapped_N2, -1, 0)
        return (sums[0] + top) / (sums[1] + bottom) - (sums[2] - top) / (sums[3] - bottom)

    result = _all_swaps(gap, n) if exact else _random_swaps(gap, n, tried, seed)
    differing = int(((table[0] != table[2]) | (table[1] != table[3])).sum())
    smallest = _smallest(differing) if exact else max(_smallest(differing), 2 / (tried + 1))
    value, p_value = float(result.statistic), float(result.pvalue)
    status = "different" if p_value < level else "no evidence"
    text = _words(names, value, p_value, n, smallest, exact, level)
    return Permutation(status, value, p_value, n, smallest, exact, text)


def _all_swaps(gap: Statistic, n: int) -> Any:
    return _permutation_test(
        (np.zeros(n), np.ones(n)), gap, permutation_type="samples", vectorized=True, n_resamples=2**n
    )


def _random_swaps(gap: Statistic, n: int, tried: int, seed: int) -> Any:
    def drawn(size: tuple[int, int]) -> Floats:
        return _swaps(size, seed)

    return _monte_carlo_test(np.zeros(n), drawn, gap, vectorized=True, n_resamples=tried, axis=-1)


@lru_cache(maxsize=2)
def _swaps(size: tuple[int, int], seed: int) -> Floats:
    """1 where a document's pairs trade places. The same for every test of as many documents, so drawn once."""
    swaps = np.random.default_rng(seed).integers(2, size=size).astype(np.float64)
    swaps.flags.writeable = False
    return swaps


def _smallest(differing: int) -> float:
    """Two of the 2 ** m swaps are as extreme as can be: all as they are, and all swapped."""
    return min(1.0, 2.0 ** (1 - differing))


def _words(
    names: tuple[str, str], value: float, p_value: float, n: int, smallest: float, exact: bool, level: float
) -> str:
    how = f"{probability(p_value)}, {'exact' if exact else 'random'} permutation test over {n} documents"
    gap = f"{100 * value:+.1f} points of acceptance"
    if p_value < level:
        return f"{names[0]} and {names[1]} differ by {gap} ({how})."
    text = f"no evidence that {names[0]} and {names[1]} differ: {gap} ({how})."
    if smallest < level:
        return text
    return f"{text} These documents cannot give a p-value below {smallest:.3g}, however large the difference."
