"""Permutation tests against every swap tried by hand."""

from itertools import product

import pytest

from bdcore.collapse import permutation_test

BETTER = [(9, 12), (30, 40), (14, 16), (50, 80), (7, 8), (20, 30), (11, 12), (36, 40)]
WORSE = [(6, 14), (22, 40), (9, 16), (30, 70), (5, 8), (9, 30), (6, 12), (20, 44)]
CLOSE = [(10, 12), (28, 40), (12, 16), (55, 80), (6, 8), (22, 30), (10, 12), (35, 40)]


def by_hand(first, second):
    """Two-sided p over all 2 ** n swaps of whole documents."""

    def gap(swaps):
        chosen = [(b, a) if swap else (a, b) for a, b, swap in zip(first, second, swaps, strict=True)]
        one, other = zip(*chosen, strict=True)
        return sum(a for a, _ in one) / sum(d for _, d in one) - sum(a for a, _ in other) / sum(d for _, d in other)

    null = [gap(swaps) for swaps in product((False, True), repeat=len(first))]
    seen = null[0]
    tails = (sum(g >= seen - 1e-12 for g in null), sum(g <= seen + 1e-12 for g in null))
    return seen, min(1.0, 2 * min(tails) / len(null))


@pytest.mark.parametrize("second", [WORSE, CLOSE])
def test_exact_p_value_is_that_of_all_swaps_of_whole_documents(second):
    found = permutation_test(BETTER, second)
    assert (found.difference, found.p_value) == pytest.approx(by_hand(BETTER, second))
    assert (found.n, found.exact) == (8, True)


def test_a_consistent_gain_on_eight_documents_has_the_smallest_p_value():
    found = permutation_test(BETTER, WORSE, names=("ours", "the base"))
    assert (found.status, found.p_value, found.smallest) == ("different", 2 / 2**8, 2 / 2**8)
    assert "ours and the base differ by +" in found.sentence
    assert "exact permutation test over 8 documents" in found.sentence


def test_who_is_first_changes_the_sign_alone():
    one, other = permutation_test(BETTER, WORSE), permutation_test(WORSE, BETTER)
    assert one.difference == pytest.approx(-other.difference)
    assert one.p_value == other.p_value


def test_equal_drafters_are_no_evidence():
    found = permutation_test(BETTER, BETTER)
    assert (found.status, found.p_value, found.difference) == ("no evidence", 1.0, 0.0)


def test_four_documents_cannot_reach_the_level_and_it_is_said():
    found = permutation_test(BETTER[:4], WORSE[:4])
    assert (found.status, found.p_value, found.smallest) == ("no evidence", 0.125, 0.125)
    assert "cannot give a p-value below 0.125, however large the difference" in found.sentence


def test_documents_on_which_both_are_equal_do_not_help():
    found = permutation_test(BETTER, [*WORSE[:3], *BETTER[3:]])
    assert (found.n, found.smallest, found.p_value) == (8, 0.25, 0.25)


@pytest.mark.parametrize("n", [0, 1, 3])
def test_insufficient_below_four_documents(n):
    found = permutation_test(BETTER[:n], WORSE[:n])
    assert (found.status, found.p_value, found.n) == ("insufficient", None, n)
    assert f"{n} of the 4 documents needed" in found.sentence
    assert ("no p-value below" in found.sentence) == (n > 0)


def test_undefined_documents_are_left_out():
    found = permutation_test([*BETTER, (None, 4), (0, 0), (1, 2)], [*WORSE, (1, 4), (1, 4), (0, 0)])
    assert found == permutation_test(BETTER, WORSE)


def test_many_documents_are_sampled_and_never_give_zero():
    found = permutation_test(BETTER * 3, WORSE * 3, resamples=999)
    assert not found.exact
    assert found.p_value == found.smallest == 2 / 1000
    assert found == permutation_test(BETTER * 3, WORSE * 3, resamples=999)


def test_tables_of_different_lengths_are_refused():
    with pytest.raises(ValueError):
        permutation_test(BETTER, WORSE[:-1])
