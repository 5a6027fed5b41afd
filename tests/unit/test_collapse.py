"""Intervals and verdicts on numbers worked out by hand."""

import math

import numpy as np
import pytest
from scipy import stats

from bdcore.collapse import Cell, Estimate, budget_effects, collapse_boundaries, headlines, ratio_of_sums, ratios


def known(value: float | None, n: int = 8, width: float = 0.05) -> Estimate:
    if value is None:
        return Estimate(None, None, None, n)
    return Estimate(value, value - width, value + width, n, "BCa")


def series(values: dict[int, float | None], *, budget: int = 256, gamma: int = 4, n: int = 8, width: float = 0.05):
    return [Cell("sd_sparse", context, budget, gamma, known(v, n, width)) for context, v in values.items()]


# --- intervals


def test_ratio_is_of_sums_not_a_mean_of_ratios():
    estimate = ratio_of_sums([1, 90], [10, 100])
    assert estimate.value == pytest.approx(91 / 110)
    assert estimate.n == 2


def test_interval_covers_the_value_and_is_the_same_every_time():
    accepted, drafted = [3, 5, 8, 2, 6, 7, 4, 9], [10] * 8
    first, second = ratio_of_sums(accepted, drafted), ratio_of_sums(accepted, drafted)
    assert first == second
    assert first.low < first.value < first.high
    assert first.kind == "BCa"


def test_numerator_and_denominator_are_resampled_together():
    # Every prompt is within 1 % of 0.5, whatever its length: unpaired resampling would be wide.
    drafted = [10, 1000, 100, 5000, 20, 300]
    accepted = [0.5 * d * (1.01 if i % 2 else 0.99) for i, d in enumerate(drafted)]
    estimate = ratio_of_sums(accepted, drafted)
    assert estimate.high - estimate.low < 0.02


@pytest.mark.parametrize(
    ("top", "bottom", "value", "n"),
    [
        ([3], [4], 0.75, 1),  # one prompt
        ([2, 4, 6], [4, 8, 12], 0.5, 3),  # no spread
        ([0, 0, 0], [4, 4, 4], 0.0, 3),
        ([0, 0], [0, 0], None, 0),  # the verifier alone drafts nothing
        ([], [], None, 0),
        ([1, None, 3], [2, 2, None], 0.5, 1),  # a failed prompt counts on neither side
        ([5, 5], [0, 0], None, 2),
    ],
)
def test_no_interval_where_none_is_known(top, bottom, value, n):
    assert ratio_of_sums(top, bottom) == Estimate(value, None, None, n)


def test_percentile_where_bca_is_undefined(monkeypatch):
    real = ratios.ends

    def undefined_bca(of_sums, columns, drawn, kind, **options):
        low, high = real(of_sums, columns, drawn, kind, **options)
        return (low * math.nan, high * math.nan) if kind == "BCa" else (low, high)

    monkeypatch.setattr(ratios, "ends", undefined_bca)
    estimate = ratio_of_sums([1, 2, 3, 4, 5], [10, 10, 10, 10, 10])
    assert estimate.kind == "percentile"
    assert estimate.low < 0.3 < estimate.high


def test_interval_is_that_of_scipy_drawing_for_itself():
    """Ours shares its draws between cells; with as many as this, chance moves neither end by more than its rounding."""
    rng = np.random.default_rng(1)
    drafted = rng.integers(20, 60, 40).astype(float)
    accepted = rng.binomial(drafted.astype(int), rng.beta(2, 5, 40)).astype(float)

    def ratio(a, b, axis=-1):
        return a.sum(axis) / b.sum(axis)

    plain = stats.bootstrap((accepted, drafted), ratio, paired=True, n_resamples=40_000, rng=np.random.default_rng(2))
    ours = ratio_of_sums(accepted.tolist(), drafted.tolist(), resamples=40_000)
    assert ours.kind == "BCa"
    assert (ours.low, ours.high) == pytest.approx(tuple(plain.confidence_interval), abs=0.002)


def test_estimates_are_finite_or_none():
    for top, bottom in (([0, 1], [0, 1]), ([0, 1], [1, 0]), ([1e-300, 1], [1e-300, 1]), ([0, 0, 1], [1, 1, 1])):
        estimate = ratio_of_sums(top, bottom)
        assert all(v is None or math.isfinite(v) for v in (estimate.value, estimate.low, estimate.high))


# --- collapse over context


def test_collapsed_where_the_whole_interval_is_below_half():
    [verdict] = collapse_boundaries(series({1024: 0.8, 2048: 0.6, 4096: 0.3, 8192: 0.1}))
    assert (verdict.status, verdict.boundary, verdict.certain_from) == ("collapsed", 4096, 4096)
    for part in ("sd_sparse", "budget 256", "gamma 4", "collapses at 4096", "30.0 % (25.0 to 35.0, n = 8)", "80.0 %"):
        assert part in verdict.sentence


def test_likely_where_only_the_point_is_below():
    [verdict] = collapse_boundaries(series({1024: 0.8, 2048: 0.38, 4096: 0.1}))
    assert (verdict.status, verdict.boundary, verdict.certain_from) == ("likely", 2048, 4096)
    assert "likely" in verdict.sentence
    assert "certain at 4096" in verdict.sentence


def test_a_point_without_interval_is_never_certain():
    cells = series({1024: 0.8})
    cells.append(Cell("sd_sparse", 2048, 256, 4, Estimate(0.1, None, None, 8)))
    [verdict] = collapse_boundaries(cells)
    assert (verdict.status, verdict.certain_from) == ("likely", None)


def test_not_reached_is_an_answer():
    [verdict] = collapse_boundaries(series({1024: 0.8, 2048: 0.5, 4096: 0.7}))
    assert (verdict.status, verdict.boundary) == ("not reached", None)
    assert verdict.retained == pytest.approx(0.5 / 0.8)
    assert "does not collapse up to 4096 tokens" in verdict.sentence
    assert "50.0 %" in verdict.sentence


def test_the_share_is_a_parameter():
    cells = series({1024: 0.8, 2048: 0.5})
    assert collapse_boundaries(cells, share=0.9)[0].status == "collapsed"
    assert "below 90 % of it" in collapse_boundaries(cells, share=0.9)[0].sentence


@pytest.mark.parametrize(
    ("cells", "reason"),
    [
        (series({1024: 0.8, 2048: 0.1}, n=3), "3 of the 4 prompts needed at 1024 tokens"),
        (series({1024: 0.8}), "only one context"),
        (series({1024: 0.0, 2048: 0.0}), "already 0"),
        (series({1024: None, 2048: None}, n=0), "0 of the 4 prompts needed"),
    ],
)
def test_insufficient_says_why(cells, reason):
    [verdict] = collapse_boundaries(cells)
    assert verdict.status == "insufficient"
    assert reason in verdict.sentence


def test_a_context_with_too_few_prompts_is_left_out_and_said():
    cells = [*series({1024: 0.8, 2048: 0.7}), *series({4096: 0.1}, n=2)]
    [verdict] = collapse_boundaries(cells)
    assert verdict.status == "not reached"
    assert "up to 2048 tokens" in verdict.sentence
    assert "Too few prompts to judge 4096 tokens" in verdict.sentence


def test_the_verifier_alone_has_no_verdict():
    assert collapse_boundaries([Cell("ar", c, -1, 0, Estimate(None, None, None, 0)) for c in (1024, 2048)]) == []


def test_a_gamma_sweep_at_a_constant_per_token_rate_is_no_collapse():
    """B52a: at rate .8 acceptance is .72, .5904, .4161 for gamma 2, 4, 8, by arithmetic alone."""
    rate = 0.8
    cells = []
    for gamma, expected in ((2, 0.72), (4, 0.5904), (8, 0.4161)):
        acceptance = sum(rate**i for i in range(1, gamma + 1)) / gamma
        assert acceptance == pytest.approx(expected, abs=1e-4)
        # The long context is measured at the long gamma only, as in a grid that adapts gamma.
        cells += [Cell("budgetdraft", context, 256, gamma, known(acceptance)) for context in (1024, 4096)]
    cells.append(Cell("budgetdraft", 8192, 256, 16, known(0.2)))
    verdicts = collapse_boundaries(cells)
    assert [v.status for v in verdicts if v.gamma != 16] == ["not reached"] * 3
    assert [v.status for v in verdicts if v.gamma == 16] == ["insufficient"]
    assert budget_effects(cells) == []


def test_settings_are_never_mixed():
    cells = [
        Cell("budgetdraft", 1024, 256, 4, known(0.9), "greedy"),
        Cell("budgetdraft", 4096, 256, 4, known(0.1), "replay"),
    ]
    assert {v.status for v in collapse_boundaries(cells)} == {"insufficient"}


# --- budgets


def by_budget(values: dict[int, float], *, n: int = 8, width: float = 0.05) -> list[Cell]:
    return [Cell("budgetdraft", 4096, budget, 5, known(v, n, width)) for budget, v in values.items()]


def test_identical_acceptance_at_every_budget_is_no_effect():
    """The paper's 4K rows: the same four digits at B = 256 to 2048."""
    [effect] = budget_effects(by_budget({256: 0.6798, 512: 0.6798, 1024: 0.6798, 2048: 0.6798}))
    assert (effect.status, effect.spread) == ("no effect", 0.0)
    assert "budget has no effect: acceptance is 68.0 %" in effect.sentence


def test_overlapping_intervals_are_no_effect_within_them():
    [effect] = budget_effects(by_budget({256: 0.50, 512: 0.52}))
    assert effect.status == "no effect"
    assert "within the intervals" in effect.sentence


def test_a_budget_effect_names_both_ends_and_the_spread():
    [effect] = budget_effects(by_budget({256: 0.6648, 512: 0.6215, 1024: 0.5580, 2048: 0.3392}))
    mean = (0.6648 + 0.6215 + 0.5580 + 0.3392) / 4
    assert effect.status == "effect"
    assert effect.spread == pytest.approx((0.6648 - 0.3392) / mean)
    assert "33.9 % (28.9 to 38.9, n = 8) at budget 2048 to 66.5 %" in effect.sentence


def test_the_full_cache_is_a_budget_too():
    [effect] = budget_effects(by_budget({-1: 0.9, 256: 0.3}))
    assert effect.status == "effect"
    assert "at budget full" in effect.sentence


def test_too_few_prompts_give_no_budget_verdict():
    [effect] = budget_effects(by_budget({256: 0.1, 512: 0.9}, n=3))
    assert (effect.status, effect.spread) == ("insufficient", None)


def test_one_budget_has_nothing_to_compare():
    assert budget_effects(by_budget({256: 0.5})) == []


# --- headlines


def test_headline_counts_the_series_and_names_the_earliest():
    cells = [
        *series({1024: 0.8, 2048: 0.1}, budget=256),
        *series({1024: 0.8, 2048: 0.7, 4096: 0.1}, budget=512),
        *series({1024: 0.8, 2048: 0.7}, budget=-1),
    ]
    [line] = headlines(collapse_boundaries(cells))
    assert line.status == "collapsed"
    assert "collapses in 2, does not collapse in 1 of 3 series" in line.sentence
    assert "Earliest: sd_sparse, budget 256, gamma 4: collapses at 2048 tokens" in line.sentence


def test_headline_without_a_collapse_shows_the_weakest_series():
    cells = [*series({1024: 0.8, 2048: 0.7}, budget=256), *series({1024: 0.8, 2048: 0.6}, budget=512)]
    [line] = headlines(collapse_boundaries(cells))
    assert line.status == "not reached"
    assert "does not collapse in 2 of 2 series" in line.sentence
    assert "Weakest: sd_sparse, budget 512" in line.sentence


def test_headline_of_a_single_series_is_its_sentence():
    [verdict] = collapse_boundaries(series({1024: 0.8, 2048: 0.7}))
    assert headlines([verdict])[0].sentence == verdict.sentence
