"""Is a text a loop? Distinct n-grams and a flag, since loops inflate every acceptance figure."""

from collections.abc import Sequence

LOOP_SHARE = 0.6
"""Below this share of distinct 4-grams a text counts as degenerate: more than two fifths of it repeats itself."""


def distinct_n(tokens: Sequence[int], n: int) -> float | None:
    """Distinct n-grams / n-grams; None for texts shorter than n."""
    grams = [tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1)]
    return len(set(grams)) / len(grams) if grams else None


def is_degenerate(tokens: Sequence[int]) -> bool | None:
    """Whether the text loops; None where it is too short to say."""
    share = distinct_n(tokens, 4)
    return None if share is None else share < LOOP_SHARE
