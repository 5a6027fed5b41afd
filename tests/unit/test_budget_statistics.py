"""Does acceptance depend on the budget, and does it ever fall with it: tables whose truth is known."""

import numpy as np
import pytest

from bdcore.collapse import budget_sensitivity, monotonicity
from bdcore.collapse.monotone import isotonic
from bdcore.collapse.pairing import difference

# Eight documents from hard to easy: what one says of another is far more than what a budget does.
LEVELS = [10, 18, 25, 33, 42, 55, 67, 80]
NOISE = [(1, -2, 0, 2), (-1, 0, 2, -2), (2, 1, -1, 0), (0, -1, 1, 1), (-2, 2, 0, -1), (1, 0, -2, 2), (0, 1, 1, -2)]
NOISE.append((-1, -1, -1, 0))


def by_budget(shifts: dict[int, int], n: int = 8, noise: int = 1):
    """Accepted of 100 drafted: each document's level, the budget's shift, and noise that adds up to 0 by budget."""
    return {
        budget: [(LEVELS[i] + shift + noise * NOISE[i][column], 100) for i in range(n)]
        for column, (budget, shift) in enumerate(shifts.items())
    }


def test_the_fit_weighs_by_drafted_tokens():
    # Worked by hand: .5 and .4 violate, and pool to (1 * .5 + 3 * .4) / 4.
    assert isotonic(np.array([0.2, 0.5, 0.4, 0.9]), np.array([1.0, 1, 3, 1])) == pytest.approx([0.2, 0.425, 0.425, 0.9])


def test_a_dip_names_the_pair_with_the_largest_fall():
    table = by_budget({64: 0, 128: 8, 256: 12, 512: 2})
    found = monotonicity(table, name="ours, 4096 tokens")
    assert (found.status, found.lower, found.upper, found.n) == ("dip", 256, 512, 8)
    assert found.p_value < 0.01
    assert found.fall == difference(table[512], table[256])
    assert found.fall.high < 0
    assert found.sentence.startswith("ours, 4096 tokens: acceptance falls with the budget (p")
    assert "from budget 256 to 512 it changes by -10.0 points (-1" in found.sentence


def test_the_distance_is_to_the_isotonic_fit():
    # .433, .553 and .453 become .433, .503, .503: two of three weights are .05 off.
    found = monotonicity(by_budget({64: 0, 128: 12, 256: 2}))
    mean = [sum(a for a, _ in sums) / 800 for sums in by_budget({64: 0, 128: 12, 256: 2}).values()]
    assert found.distance == pytest.approx(np.sqrt(2 / 3) * (mean[1] - mean[2]) / 2)


def test_acceptance_that_rises_is_monotone():
    found = monotonicity(by_budget({64: 0, 128: 8, 256: 12, 512: 16}))
    assert (found.status, found.distance, found.p_value, found.fall) == ("monotone", 0.0, 1.0, None)
    assert "falls nowhere" in found.sentence


def test_a_fall_within_the_noise_is_monotone_and_still_shown():
    found = monotonicity(by_budget({64: 0, 128: 8, 256: 12, 512: 11}, noise=3))
    assert (found.status, found.lower, found.upper) == ("monotone", 256, 512)
    assert found.p_value > 0.05
    assert "no evidence that acceptance falls" in found.sentence


def test_the_full_cache_is_the_largest_budget():
    found = monotonicity(by_budget({-1: 0, 64: 20, 128: 21}))
    assert (found.status, found.lower, found.upper) == ("dip", 128, -1)
    assert "from budget 128 to full" in found.sentence
    assert monotonicity(by_budget({-1: 20, 64: 0, 128: 10})).status == "monotone"


@pytest.mark.parametrize(
    ("table", "reason"),
    [
        (by_budget({64: 9, 128: 0}, n=3), "3 of the 4 documents needed"),
        (by_budget({64: 9}), "it takes two budgets"),
        ({}, "it takes two budgets"),
        ({64: [(0, 9)] * 5, 128: [(0, 9)] * 5}, "acceptance is 0 at every budget"),
        ({64: [(9, 10)] * 5, 128: [(2, 10)] * 5}, "differ between budgets by exactly the same"),
        (by_budget({64: 9, 128: 0}, noise=0), "differ between budgets by exactly the same"),
    ],
)
def test_insufficient_says_why(table, reason):
    """Also where documents all agree: no spread is no certainty."""
    for found in (monotonicity(table), budget_sensitivity(table)):
        assert (found.status, found.p_value) == ("insufficient", None)
        assert reason in found.sentence


def test_documents_undefined_at_one_budget_are_left_out_at_all():
    table = by_budget({64: 0, 128: 8, 256: 12, 512: 2})
    longer = {budget: [*sums, (100, 100), (None, None)] for budget, sums in table.items()}
    longer[128][8] = (None, 100)
    assert monotonicity(longer) == monotonicity(table)
    assert budget_sensitivity(longer) == budget_sensitivity(table)


def test_sensitive_where_documents_agree_though_their_levels_differ_widely():
    found = budget_sensitivity(by_budget({64: 0, 128: 3, 256: 6, 512: 9}))
    assert found.status == "sensitive"
    assert found.spread.value == pytest.approx(9 / (np.mean(LEVELS) + 4.5), abs=0.01)
    assert 0 < found.spread.low < found.spread.value < found.spread.high
    assert "acceptance depends on the budget (p" in found.sentence
    assert "at budget 64 to" in found.sentence and "at budget 512, range / mean" in found.sentence


def test_insensitive_where_the_budget_only_adds_noise():
    found = budget_sensitivity(by_budget({64: 0, 128: 0, 256: 0, 512: 0}, noise=3))
    assert found.status == "insensitive"
    assert found.p_value > 0.05
    assert found.spread.low == 0.0
    assert found.spread.kind == "basic"


def test_the_same_acceptance_at_every_budget_is_insensitive():
    """The paper's 4K rows: one document's counts at every budget."""
    found = budget_sensitivity({budget: [(level, 100) for level in LEVELS] for budget in (256, 512, 1024)})
    assert (found.status, found.spread.value, found.p_value) == ("insensitive", 0.0, 1.0)
