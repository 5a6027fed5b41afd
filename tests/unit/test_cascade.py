"""Two levels of drafting: the verifier's own text, rounds of the verifier drafting for itself, exact distributions."""

from collections import Counter

import pytest
import torch

from bdcore.decoding import decoder
from bdcore.decoding.cascade import Cascade, CascadeProposer
from bdcore.decoding.decoder import decode, decode_batch, prefill
from bdcore.decoding.draft_length import DraftRule
from bdcore.decoding.sampling import Sampling
from bdcore.kv.budget import FULL, Selection
from bdcore.models.drafter import Drafter
from bdcore.models.stepper import CachePlan
from tests.conftest import noisy_copy, tiny_llama
from tests.unit import test_sampling
from tests.unit.test_decoder import NEVER, Scripted, alone, fixed_prompt
from tests.unit.test_sampling import LEAST_P, count, exact_texts, fits

NEW_TOKENS = 20


@pytest.fixture(scope="module")
def calm():
    """A verifier that its own sparse cache agrees with now and then."""
    model = tiny_llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.03
    return model


@pytest.fixture(scope="module")
def small(calm):
    return Drafter(noisy_copy(calm, 0.01), None)


@pytest.fixture(scope="module")
def texts(calm):
    return {length: alone(calm, fixed_prompt(length), NEW_TOKENS) for length in (1, 40, 130)}


@pytest.fixture
def middle(monkeypatch):
    """(drafted, accepted, emitted) of every round of the middle level so far, and the proposer that drafted in it."""
    found, real = [], decoder.play_round

    def watched(rows):
        real(rows)
        for row in rows:
            if not isinstance(row.proposer, CascadeProposer):
                r = row._rounds[-1]
                found.append(((r.drafted, r.accepted, r.emitted), row.proposer))

    monkeypatch.setattr(decoder, "play_round", watched)
    return found


def plan_of(budget, policy="attention_mass", mode="absolute", **changes):
    return CachePlan(0, budget, Selection(policy), mode, prefill_chunk=64, **changes)


def begin(model, length, *, new_tokens=NEW_TOKENS, gamma=8):
    return prefill(model, fixed_prompt(length), new_tokens=new_tokens, gamma=gamma, chunk=64, observe=8)


def rounds(decoded):
    return [(r.drafted, r.accepted, r.emitted) for r in decoded.rounds]


# --- the verifier's own text, by rounds of the verifier drafting for itself


@pytest.mark.parametrize(
    ("policy", "mode", "budget", "refresh"),
    [
        ("attention_mass", "absolute", 32, 0),
        ("attention_mass", "in_cache", 48, 2),
        ("last_key", "in_cache", 32, 0),
        ("oracle", "absolute", 48, 0),
        ("retrieval", "absolute", 48, 0),
        ("sink_recent", "in_cache", 32, 2),
        ("random", "absolute", 32, 0),
    ],
)
def test_greedy_text_is_the_verifiers_and_rounds_are_those_of_the_sparse_verifier(
    calm, small, texts, middle, policy, mode, budget, refresh
):
    """Greedy, the middle level says what the sparse verifier says, however the small drafter guesses."""
    counts, plan = Counter(), plan_of(budget, policy, mode, refresh=refresh)
    for length, text in texts.items():
        start = begin(calm, length)
        for gamma in (1, 4, 8):
            how = {"gamma": gamma, "new_tokens": NEW_TOKENS, "eos": NEVER}
            decoded = decode(start, Cascade(small), plan, **how)
            assert (decoded.tokens, decoded.finish_reason) == (text, "length"), f"prompt {length}, gamma {gamma}"
            assert rounds(decoded) == rounds(decode(start, Drafter(calm, None), plan, **how))
            counts["drafted"] += sum(r.drafted for r in decoded.rounds)
            counts["accepted"] += sum(r.accepted for r in decoded.rounds)
            assert plan.retrieves or decoded.drafter_cached_peak <= budget + max(gamma + 1, 2)
            assert start.stepper.logical == length
    assert 0.2 < counts["accepted"] / counts["drafted"] < 0.95, "right and wrong, or the test shows little"
    tried = sum(drafted for (drafted, _, _), _ in middle)
    assert 0.1 < sum(accepted for (_, accepted, _), _ in middle) / tried < 0.95, "the small drafter too"


def test_a_block_longer_than_the_small_cache_is_taken_back_whole(calm, small):
    """A draft of 40 tokens over a cache of 32 keys, nearly all of it rejected."""
    start = begin(calm, 130, new_tokens=44, gamma=40)
    decoded = decode(start, Cascade(small), plan_of(32, "last_key"), gamma=40, new_tokens=44, eos=NEVER)
    assert decoded.tokens == alone(calm, fixed_prompt(130), 44)
    assert max(r.drafted - r.accepted for r in decoded.rounds) > 32


def test_rounds_of_both_levels_by_hand_where_every_draft_is_right(calm, middle):
    """Both caches hold all, both drafters are twins: blocks of 4, each a check of 2 drafts and a step without any."""
    decoded = decode(
        begin(calm, 5, new_tokens=12), Cascade(Drafter(calm, None)), plan_of(64), gamma=4, new_tokens=12, eos=NEVER
    )
    assert rounds(decoded) == [(4, 4, 5), (4, 4, 5), (0, 0, 1)]
    assert [counts for counts, _ in middle] == [(2, 2, 3), (0, 0, 1)] * 2


def test_rounds_of_both_levels_by_hand_where_the_small_drafter_is_always_wrong(calm, texts, middle):
    """The middle level then says each token itself, and is right about all of them."""
    wrong = next(i for i in range(128) if i not in texts[1])
    never = Scripted(calm, iter(lambda: wrong, None))
    decoded = decode(begin(calm, 1, new_tokens=7), Cascade(never), plan_of(64), gamma=4, new_tokens=7, eos=NEVER)
    assert rounds(decoded) == [(4, 4, 5), (0, 0, 1)]
    assert [counts for counts, _ in middle] == [(2, 0, 1), (2, 0, 1), (1, 0, 1), (0, 0, 1)]
    assert decoded.tokens == texts[1][:7]


def test_the_small_drafter_keeps_sinks_and_the_newest_at_in_cache_positions_and_both_caches_count(calm, small, middle):
    decoded = decode(begin(calm, 130), Cascade(small), plan_of(48), gamma=4, new_tokens=NEW_TOKENS, eos=NEVER)
    proposer = middle[-1][1]
    plan = proposer.stepper.plan
    assert (plan.budget, plan.selection.policy, plan.position_mode) == (48, "sink_recent", "in_cache")
    tokens = proposer.cache.layers[0].tokens[0].tolist()
    assert tokens[:8] == list(range(8))
    assert tokens[8:] == list(range(tokens[8], proposer.stepper.logical))
    assert proposer.cache.peak_physical <= 48 + 5
    assert decoded.drafter_kv_bytes == 2 * (2 * 2 * 2 * (48 + 5) * 16 * 4)
    assert {r.drafter_kv_bytes for r in decoded.rounds} == {decoded.drafter_kv_bytes}


# --- ends, rules, batches


@pytest.mark.parametrize("k", [1, 3, 4, 9])
def test_eos_ends_the_text_and_what_lies_after_it_is_not_counted(calm, texts, k):
    eos = {texts[1][k]}
    expected = texts[1][: texts[1].index(texts[1][k]) + 1]
    decoded = decode(begin(calm, 1), Cascade(Drafter(calm, None)), plan_of(64), gamma=8, new_tokens=NEW_TOKENS, eos=eos)
    assert (decoded.tokens, decoded.finish_reason) == (expected, "eos")
    assert all(r.drafted == r.accepted for r in decoded.rounds)
    assert sum(r.emitted for r in decoded.rounds) == len(expected) - 1


def test_eos_that_the_middle_level_says_and_the_verifier_rejects_ends_the_draft_not_the_text(
    calm, small, texts, monkeypatch
):
    drafts, real = [], CascadeProposer.draft

    def watched(proposer):
        real(proposer)
        drafts.append((len(proposer.row.tokens), list(proposer.row.draft)))

    monkeypatch.setattr(CascadeProposer, "draft", watched)
    start, text = begin(calm, 130), texts[130]
    how = {"gamma": 4, "new_tokens": NEW_TOKENS}
    decode(start, Cascade(small), plan_of(32, "last_key"), eos=NEVER, **how)
    wrong = next(d[0] for at, d in drafts if len(d) == 4 and d[0] not in text)
    drafts.clear()
    decoded = decode(start, Cascade(small), plan_of(32, "last_key"), eos={wrong}, **how)
    assert (decoded.tokens, decoded.finish_reason) == (text, "length")
    assert [wrong] in [draft for _, draft in drafts]
    assert [r.drafted for r in decoded.rounds] == [len(draft) for _, draft in drafts]


def test_an_adaptive_length_changes_no_text_and_confidence_is_refused(calm, small, texts):
    start = begin(calm, 130)
    how = {"new_tokens": NEW_TOKENS, "eos": NEVER}
    decoded = decode(start, Cascade(small), plan_of(32), gamma=DraftRule("adaptive", 4), **how)
    assert decoded.tokens == texts[130]
    assert len({r.drafted for r in decoded.rounds}) > 1
    with pytest.raises(ValueError, match="gamma_mode = confidence"):
        decode(start, Cascade(small), plan_of(32), gamma=DraftRule("confidence", 4), **how)


def test_rows_of_a_batch_are_what_they_are_alone(calm, small, texts):
    how = {"gamma": 4, "new_tokens": NEW_TOKENS, "eos": NEVER}
    for sampling in (Sampling(), Sampling(1.0)):
        lengths = [40, 130]
        together = decode_batch(
            [begin(calm, n) for n in lengths], Cascade(small), plan_of(32), sampling=sampling, seeds=[3, 4], **how
        )
        single = [
            decode(begin(calm, n), Cascade(small), plan_of(32), sampling=sampling, seed=seed, **how)
            for n, seed in zip(lengths, (3, 4), strict=True)
        ]
        assert [(d.tokens, rounds(d)) for d in together] == [(d.tokens, rounds(d)) for d in single]


def test_a_small_drafter_that_cannot_read_an_id_leaves_the_middle_level_alone(verifier, middle):
    prompt = [i % 64 for i in fixed_prompt(40)]
    start = prefill(verifier, prompt, new_tokens=NEW_TOKENS, gamma=4, chunk=64)
    short = Cascade(Drafter(tiny_llama(vocab=64), None))
    decoded = decode(start, short, plan_of(64), gamma=4, new_tokens=NEW_TOKENS, eos=NEVER)
    assert decoded.tokens == alone(verifier, prompt, NEW_TOKENS)
    assert any(token >= 64 for token in decoded.tokens)
    assert {counts for counts, _ in middle[-4:]} == {(0, 0, 1)}


# --- sampled


LONG = torch.randint(3, 12, (30,), generator=torch.Generator().manual_seed(1)).tolist()
"""A prompt of which a budget of 4 keys loses nearly all, so that the middle level is far from the verifier."""


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=6)])
def test_sampled_text_has_exactly_the_verifiers_distribution(sampling, middle, monkeypatch):
    """Texts of two and three tokens against their probabilities by cache-free forwards; and the drafts of the middle
    level against the distributions that they are checked with. Both levels are right and wrong.
    """
    monkeypatch.setattr(test_sampling, "PROMPT", LONG)
    model = tiny_llama(vocab=12, layers=1, seed=5)
    start = prefill(model, LONG, new_tokens=5, gamma=3, chunk=64)
    plan = CachePlan(0, 4, Selection("sink_recent", chunk=1, sinks=1, recent=1, window=1), prefill_chunk=64)
    cascade, seen, counts = Cascade(Drafter(noisy_copy(model, 0.2), None)), [], Counter()
    hits_V, expected_V, variance_V = torch.zeros(3, 12, dtype=torch.float64)
    real = CascadeProposer.draft

    def watched(proposer):
        real(proposer)
        for token, q_V in zip(proposer.row.draft, proposer.row.drafted_from, strict=True):
            hits_V[token] += 1
            expected_V.add_(q_V)
            variance_V.add_(q_V * (1 - q_V))

    monkeypatch.setattr(CascadeProposer, "draft", watched)
    for seed in range(200):
        decoded = decode(start, cascade, plan, gamma=3, new_tokens=5, eos={2}, sampling=sampling, seed=seed)
        seen.append(tuple(decoded.tokens[:3]))
        counts["drafted"] += sum(r.drafted for r in decoded.rounds)
        counts["accepted"] += sum(r.accepted for r in decoded.rounds)
    assert ((hits_V - expected_V).abs() <= 4.5 * variance_V.sqrt() + 1e-6).all()
    for length in (2, 3):
        exact = exact_texts(model, sampling, length)
        assert fits(count([text[:length] for text in seen], exact), list(exact.values())) > LEAST_P
    assert 0.1 * counts["drafted"] < counts["accepted"] < 0.7 * counts["drafted"]
    tried, kept = (sum(found[i] for found, _ in middle) for i in (0, 1))
    assert 0.1 * tried < kept < 0.95 * tried


def test_sampled_drafts_are_checked_with_the_middle_levels_own_distributions(calm, small, monkeypatch):
    """Where its cache holds all, they are the verifier's, whatever the small drafter thinks: nothing is rejected."""
    sampling = Sampling(1.5)
    start = begin(calm, 5)
    for seed in range(3):
        decoded = decode(
            start, Cascade(small), plan_of(64), gamma=4, new_tokens=NEW_TOKENS, eos=NEVER, sampling=sampling, seed=seed
        )
        assert sum(r.accepted for r in decoded.rounds) == sum(r.drafted for r in decoded.rounds) > 0
        again = decode(
            start, Cascade(small), plan_of(64), gamma=4, new_tokens=NEW_TOKENS, eos=NEVER, sampling=sampling, seed=seed
        )
        assert again.tokens == decoded.tokens
    assert start.stepper.plan.budget == FULL
