"""Expected speedups against closed forms and against rounds drawn at random."""

import random

import pytest

from bdcore.collapse import (
    Costs,
    agreement,
    best_gamma,
    break_even,
    expected_speedups,
    largest_cost_ratio,
    tokens_per_round,
)

FLAT = Costs(draft_s=0.1, verify_s=dict.fromkeys(range(1, 9), 1.0), ar_s=1.0)


@pytest.mark.parametrize(("gamma", "tokens"), [(2, 2.44), (4, 3.3616), (8, 4.3289)])
def test_tokens_at_a_constant_acceptance_are_the_geometric_sum(gamma, tokens):
    assert tokens_per_round([0.8] * 8, gamma) == pytest.approx(tokens, abs=1e-4)
    assert tokens_per_round([0.8] * 8, gamma) == pytest.approx((1 - 0.8 ** (gamma + 1)) / 0.2)


def test_tokens_of_unequal_positions_are_those_of_rounds_played_out():
    acceptance, rng = [0.9, 0.4, 0.7], random.Random(0)

    def play() -> int:
        kept = 0
        while kept < 3 and rng.random() < acceptance[kept]:
            kept += 1
        return kept + 1

    mean = sum(play() for _ in range(40000)) / 40000
    assert tokens_per_round(acceptance, 3) == pytest.approx(1 + 0.9 + 0.36 + 0.252)
    assert tokens_per_round(acceptance, 3) == pytest.approx(mean, abs=0.02)


def test_a_position_no_draft_reached_adds_nothing():
    assert tokens_per_round([0.5, 0.0, None], 3) == 1.5
    assert tokens_per_round([], 0) == 1.0


def test_expected_speedups_and_their_best():
    speedups = expected_speedups([0.8] * 8, FLAT)
    assert speedups[0] == 1.0
    assert speedups[4] == pytest.approx(3.3616 / 1.4)
    assert best_gamma(speedups) == max(range(1, 9), key=lambda g: (1 - 0.8 ** (g + 1)) / 0.2 / (1 + 0.1 * g))
    assert set(expected_speedups([0.8] * 3, FLAT)) == {0, 1, 2, 3}


def test_no_gamma_is_best_where_none_pays():
    assert best_gamma(expected_speedups([0.05] * 8, FLAT)) == 0


def test_ties_go_to_the_shorter_draft():
    assert best_gamma({4: 1.5, 2: 1.5, 8: 1.2}) == 2


def test_at_the_break_even_acceptance_the_speedup_is_one():
    costs = Costs(draft_s=0.13, verify_s={1: 1.1, 4: 1.2}, ar_s=1.0)
    for gamma in (1, 4):
        found = break_even(costs, gamma)
        assert 0 < found.conditional < 1
        assert expected_speedups([found.conditional] * gamma, costs)[gamma] == pytest.approx(1.0)
        assert found.acceptance * gamma + 1 == pytest.approx(found.tokens)
        assert tokens_per_round([found.conditional] * gamma, gamma) == pytest.approx(found.tokens)


def test_break_even_at_the_ends():
    never = break_even(Costs(draft_s=2.0, verify_s={2: 1.0}, ar_s=1.0), 2)
    assert (never.tokens, never.acceptance, never.conditional) == (5.0, None, None)
    always = break_even(Costs(draft_s=0.0, verify_s={2: 0.9}, ar_s=1.0), 2)
    assert (always.acceptance, always.conditional) == (0.0, 0.0)
    just = break_even(Costs(draft_s=1.0, verify_s={2: 1.0}, ar_s=1.0), 2)
    assert (just.acceptance, just.conditional) == (1.0, 1.0)


def test_what_pair_would_do():
    ratios = {1: 1.1, 4: 1.2}
    found = largest_cost_ratio([0.6] * 4, ratios)
    # gamma 1: (1.6 - 1.1) / 1; gamma 4: (2.3056 - 1.2) / 4 = .2764.
    assert (found.gamma, found.ratio) == (1, pytest.approx(0.5))
    assert "less than 0.500 of an `ar` step" in found.sentence
    costs = Costs(draft_s=found.ratio, verify_s=ratios, ar_s=1.0)
    assert max(v for g, v in expected_speedups([0.6] * 4, costs).items() if g) == pytest.approx(1.0)


def test_a_longer_draft_may_bear_the_dearer_drafter():
    assert largest_cost_ratio([0.9] * 4, {1: 1.8, 4: 1.8}).gamma == 4


def test_not_even_a_free_drafter_pays():
    found = largest_cost_ratio([0.1], {1: 1.2})
    assert found.ratio is None
    assert "not even a free drafter pays" in found.sentence


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: tokens_per_round([0.5], 2), "gamma = 2"),
        (lambda: tokens_per_round([1.2], 1), r"acceptance\[0\] = 1.2"),
        (lambda: Costs(-0.1, {1: 1.0}, 1.0), "draft_s = -0.1"),
        (lambda: Costs(0.1, {1: 0.0}, 1.0), r"verify_s\[1\] = 0.0"),
        (lambda: Costs(0.1, {1: 1.0}, float("nan")), "ar_s = nan"),
        (lambda: break_even(FLAT, 0), "gamma = 0"),
        (lambda: break_even(FLAT, 9), "gamma = 9"),
        (lambda: largest_cost_ratio([0.5], {2: 1.0}), "name a gamma from 1 to 1"),
        (lambda: agreement({1: 1.0}, {2: [(1.0, 1.0)] * 8}), "both predicted"),
    ],
)
def test_what_cannot_be_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- predicted against measured


AR = [10.0, 12.0, 9.0, 14.0, 11.0, 13.0, 10.0, 12.0]


def seconds(speedup: float, noise: float = 0.0):
    return [(ar, ar / speedup * (1 + noise * (-1) ** i)) for i, ar in enumerate(AR)]


def test_the_same_best_gamma():
    found = agreement({2: 1.3, 4: 1.5}, {2: seconds(1.2), 4: seconds(1.4, 0.02)})
    assert (found.status, found.predicted, found.measured, found.kept.value) == ("same", 4, 4, 1.0)


def test_another_gamma_as_fast_within_the_interval():
    found = agreement({2: 1.3, 4: 1.5}, {2: seconds(1.41), 4: seconds(1.4, 0.05)})
    assert (found.status, found.predicted, found.measured) == ("within", 4, 2)
    assert found.kept.low < found.kept.value < 1 <= found.kept.high
    assert "predicted best is gamma 4, measured best gamma 2" in found.sentence


def test_another_gamma_slower_for_certain():
    found = agreement({2: 1.3, 4: 1.5}, {2: seconds(1.4), 4: seconds(1.0, 0.02)})
    assert (found.status, found.kept.value) == ("apart", pytest.approx(1 / 1.4, rel=0.01))
    assert "slower for certain" in found.sentence


def test_not_to_speculate_is_a_prediction_too():
    found = agreement({2: 0.9, 4: 0.8}, {2: seconds(0.85, 0.02), 4: seconds(0.7)})
    assert (found.status, found.predicted, found.measured) == ("same", 0, 0)
    found = agreement({2: 1.2, 4: 0.8}, {2: seconds(0.85, 0.02), 4: seconds(0.7)})
    assert (found.status, found.predicted, found.measured) == ("apart", 2, 0)


def test_too_few_documents_or_no_spread_cannot_be_judged():
    few = agreement({2: 1.3, 4: 1.5}, {2: seconds(1.4)[:3], 4: seconds(1.0)[:3]})
    assert (few.status, few.measured) == ("insufficient", None)
    # Every document says exactly the same: no interval, so nothing for certain.
    assert agreement({2: 1.3, 4: 1.5}, {2: seconds(1.4), 4: seconds(1.0)}).status == "insufficient"
