"""Accepting drafts and cutting what is emitted: ids worked out by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bdcore.decoding.accept import accept_greedy, commit

NEVER = frozenset()


@pytest.mark.parametrize(
    ("drafted", "verified", "expected"),
    [
        ([], [9], (0, 9)),  # the verifier alone
        ([1, 2, 3, 4], [7, 2, 3, 4, 5], (0, 7)),  # the first is wrong: later matches do not count
        ([1, 2, 3, 4], [1, 7, 3, 4, 5], (1, 7)),
        ([1, 2, 3, 4], [1, 2, 3, 4, 5], (4, 5)),  # all accepted, and the bonus token
    ],
)
def test_drafts_are_kept_up_to_the_first_that_differs(drafted, verified, expected):
    assert accept_greedy(drafted, verified) == expected


def test_two_rounds_of_four_drafts_with_matches_1011_and_1111_accept_5_of_8():
    verified = [1, 2, 3, 4, 5]
    rounds = [[1, 9, 3, 4], [1, 2, 3, 4]]
    accepted = [accept_greedy(drafted, verified)[0] for drafted in rounds]
    assert accepted == [1, 4]
    assert sum(accepted) / sum(map(len, rounds)) == 0.625
    assert sum(a + 1 for a in accepted) / len(rounds) == 3.5


@given(st.lists(st.integers(0, 2), max_size=6), st.lists(st.integers(0, 2), min_size=7, max_size=7))
def test_what_is_accepted_is_the_common_beginning(drafted, verified):
    accepted, own = accept_greedy(drafted, verified[: len(drafted) + 1])
    assert drafted[:accepted] == verified[:accepted]
    assert own == verified[accepted]
    assert accepted == len(drafted) or drafted[accepted] != own


@pytest.mark.parametrize(
    ("accepted", "eos", "remaining", "expected"),
    [
        (4, NEVER, 9, ([1, 2, 3, 4, 5], 4, None)),
        (2, NEVER, 9, ([1, 2, 5], 2, None)),
        (0, NEVER, 9, ([5], 0, None)),
        (4, {2}, 9, ([1, 2], 2, "eos")),  # accepted drafts after EOS are neither emitted nor counted
        (4, {1}, 9, ([1], 1, "eos")),
        (4, {5}, 9, ([1, 2, 3, 4, 5], 4, "eos")),  # EOS as the verifier's own token
        (1, {3}, 9, ([1, 5], 1, None)),  # EOS in a rejected draft does not stop
        (4, {4, 2}, 9, ([1, 2], 2, "eos")),  # the first of several EOS ids
        (4, NEVER, 5, ([1, 2, 3, 4, 5], 4, "length")),
        (4, NEVER, 3, ([1, 2, 3], 3, "length")),  # accepted never exceeds emitted
        (4, NEVER, 1, ([1], 1, "length")),
        (4, {3}, 3, ([1, 2, 3], 3, "eos")),  # EOS as the last token that fits
        (4, {4}, 3, ([1, 2, 3], 3, "length")),  # EOS beyond the limit
    ],
)
def test_a_block_is_cut_at_eos_and_at_the_limit(accepted, eos, remaining, expected):
    assert commit([1, 2, 3, 4], accepted, 5, eos=eos, remaining=remaining) == expected
