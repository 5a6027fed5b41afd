"""How many tokens are drafted: the rules by themselves, with simulated costs, and their effect on the text: none."""

import itertools
import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bdcore.decoding import decoder
from bdcore.decoding.decoder import decode, decode_batch, prefill
from bdcore.decoding.draft_length import Adaptive, DraftLength, DraftRule
from bdcore.decoding.sampling import Sampling
from bdcore.kv.budget import FULL
from tests.unit.test_decoder import NEVER, alone, cache_plan, fixed_prompt

# --- rules


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"mode": "dynamic"}, "gamma_mode = 'dynamic': legal are fixed, confidence, adaptive"),
        ({"gamma": -1}, "gamma = -1: at least 0"),
        ({"threshold": 1.5}, "threshold = 1.5: a probability"),
        ({"threshold": float("nan")}, "threshold = nan: a probability"),
    ],
)
def test_an_illegal_rule_is_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        DraftRule(**change)


def test_fixed_drafts_the_same_whatever_happens_and_however_unsure_the_drafter_is():
    length = DraftRule("fixed", 5).start()
    for accepted in (0, 5, 2):
        assert length.next() == 5
        assert length.goes_on(0.0)
        length.learn(drafted=5, accepted=accepted, draft_s=1.0, verify_s=1.0)


def test_confidence_goes_on_from_the_threshold_upwards():
    length = DraftRule("confidence", 5, threshold=0.4).start()
    assert length.next() == 5
    assert [length.goes_on(c) for c in (0.39, 0.4, 0.41)] == [False, True, True]


# --- adaptive, driven by simulated costs and acceptances: no clock


def rate(g, acceptance, draft, verify, token):
    """Expected tokens per second of rounds with draft length g."""
    tokens = 1 + sum(acceptance**i for i in range(1, g + 1))
    return tokens / (g * draft + verify + token * (g + 1))


def best_length(gamma, *costs):
    return max(range(gamma + 1), key=lambda g: rate(g, *costs))


def simulate(gamma, acceptance_of, draft, verify, token, *, rounds, seed=0, noise=0.0, reading=1 / 16):
    """(lengths chosen, tokens per second) where a draft costs `draft`, a verify `verify` and `token` for each token."""
    rng, length = random.Random(seed), Adaptive(gamma)
    chosen, tokens, seconds, behind = [], 0, 0.0, 0
    for k in range(rounds):
        g, kept = length.next(), 0
        while kept < g and rng.random() < acceptance_of(k):
            kept += 1
        # After plain rounds the drafter first reads what it missed; a token costs `reading` of a draft.
        draft_s = (g * draft + behind * draft * reading) * max(0.1, rng.gauss(1, noise)) if g else 0.0
        verify_s = (verify + token * (g + 1)) * max(0.1, rng.gauss(1, noise))
        length.learn(drafted=g, accepted=kept, draft_s=draft_s, verify_s=verify_s)
        behind = 0 if g else behind + 1
        chosen.append(g)
        tokens, seconds = tokens + kept + 1, seconds + draft_s + verify_s
    return chosen, tokens / seconds


COSTS = [(0.05, 1.0, 0.02), (0.2, 1.0, 0.05), (0.5, 1.0, 0.1)]


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("acceptance", [0.1, 0.2, 0.4, 0.6, 0.8, 0.95])
def test_adaptive_comes_near_the_speed_of_the_best_length_by_brute_force(acceptance, costs, noise):
    most = max(rate(g, acceptance, *costs) for g in range(9))
    rates = [simulate(8, lambda _: acceptance, *costs, rounds=400, seed=s, noise=noise)[1] for s in range(6)]
    # What is missing: finding out, and being unlucky for a while. A pause that never grew would cost 0.18.
    assert sum(rates) / len(rates) > 0.90 * most
    assert min(rates) > 0.86 * most


@pytest.mark.parametrize(
    ("acceptance", "costs", "best"),
    [(1.0, COSTS[0], 8), (1.0, COSTS[2], 8), (0.0, COSTS[1], 0), (0.0, COSTS[2], 0), (0.4, COSTS[0], 2)],
)
def test_adaptive_settles_on_the_best_length(acceptance, costs, best):
    assert best_length(8, acceptance, *costs) == best
    chosen, _ = simulate(8, lambda _: acceptance, *costs, rounds=300)
    settled = sorted(chosen[100:])
    assert settled[len(settled) // 2] == best


def test_adaptive_prefers_short_drafts_where_only_the_first_is_accepted():
    length = Adaptive(8)
    for _ in range(60):
        g = length.next()
        length.learn(drafted=g, accepted=min(g, 1), draft_s=0.1 * g, verify_s=1.0)
    assert length.next() == 1


def test_adaptive_is_off_where_drafting_cannot_win():
    # A draft costs what a verify costs.
    chosen, _ = simulate(5, lambda _: 0.2, 1.0, 1.0, 0.0, rounds=300)
    assert max(chosen[3:]) == 0, "not even tried where no acceptance would do"
    # Cheaper, but rarely right: tried now and then, one token at first.
    chosen, _ = simulate(5, lambda _: 0.1, 0.3, 1.0, 0.05, rounds=600)
    assert sum(g == 0 for g in chosen[100:]) > 0.9 * 500
    starts = [b for a, b in itertools.pairwise(chosen[10:]) if a == 0 and b > 0]
    assert starts, "and tried again"
    assert set(starts) == {1}


def test_the_pauses_of_adaptive_double_up_to_a_limit_and_start_short_again_after_a_success():
    length, pauses = Adaptive(4), []

    def until_off(accept):
        for _ in range(40):
            g = length.next()
            if not g:
                return
            length.learn(drafted=g, accepted=g if accept else 0, draft_s=0.3 * g, verify_s=1.0)

    def pause():
        n = 0
        while not length.next() and n < 200:
            length.learn(drafted=0, accepted=0, draft_s=0.0, verify_s=1.0)
            n += 1
        return n

    for _ in range(6):
        until_off(False)
        pauses.append(pause())
    assert pauses == [8, 16, 32, 64, 64, 64]
    until_off(True)
    assert length.next() == 4
    until_off(False)
    assert pause() == 8


@pytest.mark.parametrize("seed", range(5))
def test_adaptive_comes_back_on_when_acceptance_changes(seed):
    chosen, _ = simulate(8, lambda k: 0.0 if k < 300 else 0.95, 0.3, 1.0, 0.05, rounds=600, seed=seed, noise=0.05)
    assert sum(g == 0 for g in chosen[200:300]) > 85
    # One pause at most, and a few rounds to believe it.
    assert sum(chosen[400:]) / 200 > 3
    assert all(chosen[500:])


def test_what_a_drafter_reads_after_a_pause_is_no_cost_of_drafting():
    # Reading costs as much as drafting here: counted in, the one draft after a pause would look 65 times as dear.
    chosen, _ = simulate(4, lambda k: 0.0 if k < 1000 else 1.0, 0.1, 1.0, 0.05, rounds=1500, reading=1.0)
    assert set(chosen[-200:]) == {4}


@given(
    gamma=st.integers(0, 8),
    rounds=st.lists(
        st.tuples(st.floats(0, 1), st.floats(0, 10), st.floats(0, 10), st.integers(0, 8)), min_size=1, max_size=60
    ),
)
def test_adaptive_never_exceeds_gamma_whatever_it_measures(gamma, rounds):
    length = Adaptive(gamma)
    for share, draft_s, verify_s, allowed in rounds:
        g = min(length.next(), allowed)  # the limit of the text may cut it
        assert 0 <= length.next() <= gamma
        length.learn(drafted=g, accepted=round(share * g), draft_s=draft_s, verify_s=verify_s)


# --- in the decoder


def run(verifier, drafter, rule, *, prompt=40, new_tokens=40, budget=FULL, mode="absolute", **more):
    start = prefill(verifier, fixed_prompt(prompt), new_tokens=new_tokens, gamma=rule.gamma, chunk=64)
    plan = cache_plan(budget, mode=mode)
    return decode(start, drafter, plan, gamma=rule, new_tokens=new_tokens, eos=NEVER, **more)


@pytest.fixture(scope="module")
def text(verifier):
    return alone(verifier, fixed_prompt(40), 40)


@pytest.fixture(scope="module")
def long_text(verifier):
    return {n: alone(verifier, fixed_prompt(n), 80) for n in (5, 130)}


def test_threshold_0_drafts_as_fixed_does_and_threshold_1_drafts_nothing(verifier, noisy, text):
    fixed = run(verifier, noisy, DraftRule("fixed", 4))
    everything = run(verifier, noisy, DraftRule("confidence", 4, threshold=0.0))
    nothing = run(verifier, noisy, DraftRule("confidence", 4, threshold=1.0))
    counts = [[(r.drafted, r.accepted, r.emitted) for r in d.rounds] for d in (fixed, everything, nothing)]
    assert counts[0] == counts[1]
    assert set(counts[2]) == {(0, 0, 1)}
    assert fixed.tokens == everything.tokens == nothing.tokens == text


@pytest.mark.parametrize("budget", [FULL, 32])
@pytest.mark.parametrize("threshold", [0.1, 0.2, 0.3])
def test_confidence_stops_exactly_where_the_drafter_is_below_the_threshold(
    verifier, noisy, text, threshold, budget, monkeypatch
):
    asked = []
    goes_on = DraftLength.goes_on
    monkeypatch.setattr(
        DraftLength, "goes_on", lambda self, confidence: asked.append(confidence) or goes_on(self, confidence)
    )
    decoded = run(verifier, noisy, DraftRule("confidence", 6, threshold=threshold), budget=budget)
    assert decoded.tokens == text
    at, before, stopped = iter(asked), 1, 0
    for r in decoded.rounds:
        wanted = min(6, 40 - before - 1)
        seen = [next(at) for _ in range(min(r.drafted + 1, wanted))]
        assert all(c >= threshold for c in seen[: r.drafted])
        if r.drafted < wanted:
            assert seen[-1] < threshold
            stopped += 1
        if budget == FULL:  # the probability of the drafter's best token, by a cache-free forward
            for i, c in enumerate(seen[:1]):
                ids = [*fixed_prompt(40), *text[: before + i]]
                with torch.inference_mode():
                    logits = noisy.model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1]
                assert c == pytest.approx(float(logits.softmax(-1).max()), abs=1e-4)
        before += r.emitted
    assert next(at, None) is None
    assert stopped > 0
    assert any(r.drafted for r in decoded.rounds), "neither always nor never"


@pytest.mark.parametrize("mode", ["confidence", "adaptive"])
@pytest.mark.parametrize("budget", [FULL, 32])
@pytest.mark.parametrize("new_tokens", [1, 2, 7, 40])
def test_no_rule_changes_the_text_or_drafts_beyond_its_end(verifier, noisy, text, mode, budget, new_tokens):
    decoded = run(verifier, noisy, DraftRule(mode, 6), budget=budget, new_tokens=new_tokens)
    assert decoded.tokens == text[:new_tokens]
    emitted = 1
    for r in decoded.rounds:
        assert r.drafted <= min(6, max(0, new_tokens - emitted - 1))
        emitted += r.emitted


# After n plain rounds the drafter has n tokens to read, more than a block or even than its budget.
PATTERNS = [[4, *[0] * n, 4, 4] for n in (1, 4, 6, 9, 60)] + [[0] * 50 + [8] * 9, [1, 0, 8, 0, 0, 3]]


@pytest.fixture
def ledger(monkeypatch):
    """Checks both caches after every round of any decoding."""
    play = decoder.play_round

    def checked(rows):
        play(rows)
        for row in rows:
            known = len(row.prompt) + len(row.tokens)
            assert row.verifier.logical == known - 1
            if row.proposer is not None:
                stepper = row.proposer.stepper
                assert stepper.logical <= known - 1
                assert stepper.physical <= (stepper.plan.budget if stepper.sparse else stepper.logical)

    monkeypatch.setattr(decoder, "play_round", checked)


def force(monkeypatch, pattern):
    lengths = itertools.cycle(pattern)
    monkeypatch.setattr(DraftLength, "next", lambda self: min(next(lengths), self.gamma))


@pytest.mark.parametrize("pattern", PATTERNS, ids=lambda p: f"{p[0]}-{p.count(0)}-{p[-1]}")
@pytest.mark.parametrize(
    ("prompt", "budget", "mode"), [(5, FULL, "absolute"), (130, 32, "absolute"), (5, 32, "in_cache")]
)
def test_a_drafter_that_was_off_catches_up(
    verifier, twin, long_text, prompt, budget, mode, pattern, monkeypatch, ledger
):
    force(monkeypatch, pattern)
    decoded = run(verifier, twin, DraftRule("fixed", 8), prompt=prompt, new_tokens=80, budget=budget, mode=mode)
    assert decoded.tokens == long_text[prompt]
    assert any(r.drafted == 0 for r in decoded.rounds)
    if budget == FULL:
        assert all(r.accepted == r.drafted for r in decoded.rounds), "a twin that missed nothing is always right"
    else:
        assert decoded.drafter_cached_peak <= budget + 9


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    pattern=st.lists(st.integers(0, 8), min_size=1, max_size=12),
    gamma=st.integers(1, 8),
    length=st.integers(1, 60),
    budget=st.sampled_from([FULL, 32, 40, 64]),
)
def test_any_pattern_of_lengths_leaves_text_and_caches_right(verifier, noisy, ledger, pattern, gamma, length, budget):
    with pytest.MonkeyPatch.context() as patch:
        force(patch, pattern)
        rule = DraftRule("fixed", gamma)
        decoded = run(verifier, noisy, rule, prompt=length, new_tokens=24, budget=budget)
    assert decoded.tokens == run(verifier, None, rule, prompt=length, new_tokens=24).tokens


def test_sampled_text_is_the_same_whatever_the_clock_says_when_the_lengths_are(verifier, noisy, ledger):
    sampling = Sampling(temperature=1.0)
    decoded = [run(verifier, noisy, DraftRule("confidence", 4), sampling=sampling, seed=3) for _ in range(2)]
    assert decoded[0].tokens == decoded[1].tokens


def test_adaptive_switches_off_and_on_by_the_clock_alone_and_the_text_is_the_same(verifier, twin, monkeypatch):
    # Time stands still but for the drafter's forwards, which are dear for a while, then nearly free.
    now, drafts = [0.0], [0]
    feed = decoder.feed_together

    def timed(steppers, blocks, **how):
        drafter = steppers[0].model is twin.model
        drafts[0] += drafter
        now[0] += (5.0 if drafts[0] < 30 else 0.01) if drafter else 1.0
        return feed(steppers, blocks, **how)

    monkeypatch.setattr(decoder, "feed_together", timed)
    monkeypatch.setattr(decoder.time, "perf_counter", lambda: now[0])
    decoded = run(verifier, twin, DraftRule("adaptive", 4), new_tokens=60)
    assert decoded.tokens == alone(verifier, fixed_prompt(40), 60)
    drafted = [r.drafted for r in decoded.rounds]
    assert drafted[:2] == [4, 2], "two lengths to measure costs"
    assert not any(drafted[3:]), "a draft of 5 verifies never pays"


def test_rows_of_a_batch_choose_their_lengths_by_themselves(verifier, twin, noisy):
    rule = DraftRule("confidence", 6, threshold=0.5)
    prompts = [fixed_prompt(n) for n in (5, 40)]
    starts = [prefill(verifier, p, new_tokens=24, gamma=6, chunk=64) for p in prompts]
    rows = decode_batch(starts, noisy, cache_plan(), gamma=rule, new_tokens=24, eos=NEVER)
    for n, row in zip((5, 40), rows, strict=True):
        single = run(verifier, noisy, rule, prompt=n, new_tokens=24)
        assert [r.drafted for r in row.rounds] == [r.drafted for r in single.rounds]
