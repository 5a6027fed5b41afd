"""Loss and what gives it back, on tables made to lose and regain known shares."""

import pytest

from bdcore.collapse import attribute_loss
from bdcore.collapse.pairing import difference

REFERENCE = [62, 71, 55, 80, 48, 66, 74, 59]
LOSS = [31, 38, 29, 42, 22, 35, 36, 27]  # 260 of 800: 32.5 points
NOISE = [2, -1, 1, -2, 0, 1, -2, 1]


def sums(accepted):
    return [(a, 100) for a in accepted]


def regained(share: float):
    """The baseline with a share of each document's loss given back, and noise that adds up to 0."""
    return sums(r - (1 - share) * loss + e for r, loss, e in zip(REFERENCE, LOSS, NOISE, strict=True))


BASELINE = sums(r - loss for r, loss in zip(REFERENCE, LOSS, strict=True))


def test_each_swap_gives_back_the_share_it_was_made_to():
    found = attribute_loss(
        sums(REFERENCE), BASELINE, {"in_cache": regained(0.8), "random": regained(-0.2), "none": regained(0)}
    )
    assert found.lost.value == pytest.approx(0.325)
    in_cache, random, none = found.swaps
    assert in_cache.share.value == pytest.approx(0.8)
    assert in_cache.gained.value == pytest.approx(0.8 * 0.325)
    assert in_cache.share.low < 0.8 < in_cache.share.high
    assert [s.status for s in found.swaps] == ["gives back", "takes away", "no evidence"]
    assert random.share.value == pytest.approx(-0.2)
    assert none.share.low < 0 < none.share.high
    assert in_cache.sentence.startswith("in_cache gives back: 26.0 points (")
    assert "80.0 % (" in in_cache.sentence and "of the 32.5 points lost" in in_cache.sentence
    assert "the baseline lost 32.5 points (" in found.sentence


def test_points_are_the_paired_difference_to_the_baseline():
    [swap] = attribute_loss(sums(REFERENCE), BASELINE, {"full cache": regained(0.5)}).swaps
    assert swap.gained == difference(regained(0.5), BASELINE)


def test_pairing_sees_through_documents_of_different_levels():
    # Every document regains half its loss within 2 points; between documents acceptance varies by 30.
    [swap] = attribute_loss(sums(REFERENCE), BASELINE, {"sink": regained(0.5)}).swaps
    assert swap.share.high - swap.share.low < 0.2


def test_no_share_where_the_loss_may_be_nothing():
    barely = sums(r + e for r, e in zip(REFERENCE, NOISE, strict=True))
    found = attribute_loss(sums(REFERENCE), barely, {"in_cache": regained(1.3)})
    [swap] = found.swaps
    assert found.lost.low < 0 < found.lost.high
    assert swap.status == "gives back"
    assert (swap.share.value, swap.share.low, swap.share.high) == (None, None, None)
    assert "no share, since a loss is not certain" in swap.sentence
    assert "lost nothing for certain" in found.sentence


def test_a_baseline_that_gained_has_lost_nothing():
    found = attribute_loss(BASELINE, sums(REFERENCE), {"oracle": regained(0.5)})
    assert found.lost.high < 0
    assert found.swaps[0].share.value is None


def test_a_swap_is_judged_over_its_own_documents_and_says_how_many():
    holes = [(None, 100) if i < 2 else pair for i, pair in enumerate(regained(0.8))]
    found = attribute_loss(sums(REFERENCE), BASELINE, {"holes": holes, "few": [*holes[:5], *[(0, 0)] * 3]})
    assert found.lost.n == 8
    assert [(s.gained.n, s.status) for s in found.swaps] == [(6, "gives back"), (3, "insufficient")]
    assert found.swaps[1].share.value is None
    assert "3 of the 4 documents needed" in found.swaps[1].sentence


def test_too_few_documents_for_the_loss():
    found = attribute_loss(sums(REFERENCE[:3]), BASELINE[:3], {})
    assert "3 of the 4 documents needed" in found.sentence


def test_documents_that_all_agree_are_no_certainty():
    [swap] = attribute_loss(sums([60] * 5), sums([30] * 5), {"in_cache": sums([50] * 5)}).swaps
    assert (swap.status, swap.gained.value, swap.gained.low, swap.share.value) == ("no evidence", 0.2, None, None)


def test_tables_of_different_documents_are_refused():
    with pytest.raises(ValueError):
        attribute_loss(sums(REFERENCE), BASELINE, {"short": regained(0.5)[:-1]})
