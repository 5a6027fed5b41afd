"""Where drafts die, against rounds played out."""

import random

import pytest

from bdcore.collapse import by_label, by_position
from bdcore.collapse.ratios import ratio_of_sums

ACCEPTANCE = [0.9, 0.3, 0.8, 0.6]


def play(seed: int, rounds: int, cut: float = 0.0):
    """Lists of one document, and the rounds that put each position to the test; a share of rounds is cut to 2."""
    rng, accepted, drafted, tested = random.Random(seed), [0] * 4, [0] * 4, [0] * 4
    for _ in range(rounds):
        length = 2 if rng.random() < cut else 4
        alive = True
        for i in range(length):
            drafted[i] += 1
            tested[i] += alive
            alive = alive and rng.random() < ACCEPTANCE[i]
            accepted[i] += alive
    return accepted, drafted, tested


def test_conditional_acceptance_is_of_the_rounds_that_got_there():
    accepted, drafted, tested = zip(*(play(seed, 30 + 10 * seed) for seed in range(8)), strict=True)
    found = by_position(accepted, drafted)
    assert [p.position for p in found] == [1, 2, 3, 4]
    for i, p in enumerate(found):
        assert p.conditional == ratio_of_sums([a[i] for a in accepted], [t[i] for t in tested])
        assert p.reached == ratio_of_sums([a[i] for a in accepted], [d[i] for d in drafted])
        assert p.conditional.value == pytest.approx(ACCEPTANCE[i], abs=0.05)
        assert p.cut == 0
    assert found[1].conditional.low < 0.3 < found[1].conditional.high


def test_rounds_cut_short_at_random_do_not_bias():
    accepted, drafted, tested = zip(*(play(seed, 400, cut=0.5) for seed in range(8)), strict=True)
    third = by_position(accepted, drafted)[2]
    assert third.cut == sum(d[1] - d[2] for d in drafted) > 0
    exact = sum(a[2] for a in accepted) / sum(t[2] for t in tested)
    assert third.conditional.value == pytest.approx(exact, abs=0.03)
    assert third.conditional.value == pytest.approx(0.8, abs=0.04)


def test_trials_are_never_fewer_than_what_was_accepted():
    # Of two rounds one stopped after a rejected draft; the other went on and was accepted.
    [_, second] = by_position([[1, 1]], [[2, 1]])
    assert second.conditional.value == 1.0


def test_positions_nobody_reached_are_undefined_and_short_lists_end_there():
    found = by_position([[2, 0, 0], [1]], [[4, 4, 4], [3]])
    assert [p.reached.n for p in found] == [2, 1, 1]
    assert [p.conditional.value for p in found] == [pytest.approx(3 / 7), 0.0, None]
    assert by_position([], []) == []


@pytest.mark.parametrize(
    ("accepted", "drafted", "message"),
    [
        ([[3]], [[2]], r"accepted_at\[0\] = 3"),
        ([[1, 1]], [[2, 3]], r"drafted_at\[1\] = 3"),
        ([[1]], [[2, 1]], "accepted_at has 1 positions, drafted_at 2"),
    ],
)
def test_lists_that_cannot_be_are_refused(accepted, drafted, message):
    with pytest.raises(ValueError, match=message):
        by_position(accepted, drafted)


def test_labels_have_acceptance_over_their_documents_and_a_share_of_the_deaths():
    documents = [
        {"copied": (9, 10), "new": (2, 10)},
        {"copied": (18, 20), "new": (5, 20)},
        {"copied": (8, 10), "new": (1, 10), "number": (0, 5)},
        {"copied": (7, 10), "new": (None, None)},
    ]
    copied, new, number = by_label(documents)
    assert [g.label for g in (copied, new, number)] == ["copied", "new", "number"]
    assert copied.acceptance == ratio_of_sums([9, 18, 8, 7], [10, 20, 10, 10])
    assert (new.acceptance.value, new.acceptance.n) == (pytest.approx(8 / 40), 3)
    assert number.acceptance.low is None
    rejected = 8 + 32 + 5
    assert [g.rejected_share for g in (copied, new, number)] == pytest.approx(
        [8 / rejected, 32 / rejected, 5 / rejected]
    )


def test_nothing_rejected_has_no_share():
    [group] = by_label([{"a": (4, 4)}, {"a": (2, 2)}])
    assert (group.rejected_share, group.acceptance.value) == (None, 1.0)
