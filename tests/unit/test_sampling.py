"""Sampling: distributions as transformers warps them, and drafts that leave the verifier's distribution untouched.

Every draw is seeded, so a test gives the same verdict every time. Chi-square tests fail below p = 1e-4: a right
implementation would be called wrong once in 10,000 choices of seed; the faults they are meant for give p < 1e-12.
"""

import copy

import numpy as np
import pytest
import torch
from scipy.stats import chi2_contingency, chisquare

from bdcore.decoding import sequence
from bdcore.decoding.accept import accept_sampled
from bdcore.decoding.decoder import decode_batch, prefill
from bdcore.decoding.draft_length import DraftRule
from bdcore.decoding.sampling import Chooser, Sampling, draw
from bdcore.decoding.sequence import Row
from bdcore.models.drafter import Drafter
from tests.conftest import noisy_copy, tiny_llama
from tests.unit.test_decoder import NEVER, cache_plan

LEAST_P = 1e-4
DRAWS = 50_000


def warped(logits_V, *, temperature=1.0, top_k=0, top_p=1.0):
    """The distribution by its definition, in double precision."""
    p_V = (np.asarray(logits_V, dtype=np.float64) / temperature).copy()
    if top_k:
        p_V[p_V < np.sort(p_V)[-min(top_k, len(p_V))]] = -np.inf
    p_V = np.exp(p_V - p_V.max())
    p_V /= p_V.sum()
    order = np.argsort(-p_V)
    before = np.cumsum(p_V[order]) - p_V[order]  # a token stays while those before it have not reached top_p
    p_V[order[before >= top_p]] = 0
    return p_V / p_V.sum()


def chooser(sampling):
    return Chooser(sampling, prompt_len=1, eos=NEVER, device="cpu")


def fits(counts, p):
    """p-value of counts against probabilities; what is impossible must not have happened."""
    counts, p = np.asarray(counts, dtype=float), np.asarray(p, dtype=float)
    assert counts[p < 1e-12].sum() == 0, "an impossible outcome"
    rare = p * counts.sum() < 5  # pooled, as chi-square asks for
    counts = np.append(counts[~rare], counts[rare].sum())
    p = np.append(p[~rare], p[rare].sum())
    if p[-1] * counts.sum() < 1:
        assert counts[-1] < 10
        counts, p = counts[:-1], p[:-1]
    return chisquare(counts, p / p.sum() * counts.sum()).pvalue if len(p) > 1 else 1.0


# --- settings


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"temperature": -1}, "temperature = -1: legal is 0"),  # B16
        ({"temperature": float("nan")}, "temperature = nan"),
        ({"temperature": float("inf")}, "temperature = inf"),
        ({"top_k": -1}, "top_k = -1"),
        ({"top_p": 0}, "top_p = 0"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"repetition_penalty": 0}, "repetition_penalty = 0"),
        ({"min_new_tokens": -1}, "min_new_tokens = -1"),
    ],
)
def test_an_illegal_setting_is_refused_by_name(change, words):
    with pytest.raises(ValueError, match=words):
        Sampling(**change)


def test_b16_temperature_0_and_1e_6_are_greedy():
    """B16: temperature 0, 1e-6, -1 (an error, above)."""
    logits_TV = torch.tensor([[1.0, 3.0, 2.0], [5.0, 5.0 + 1e-3, 0.0]])
    for temperature in (0.0, 1e-6):
        assert Sampling(temperature=temperature).greedy
        assert chooser(Sampling(temperature=temperature)).best(logits_TV, [0, 0]) == [1, 1]
    cold = chooser(Sampling(temperature=1e-4)).probabilities(logits_TV * 100, [0, 0])
    assert cold.isfinite().all()
    assert cold[0].tolist() == [0.0, 1.0, 0.0]


# --- warping


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 3, 12, 50])
@pytest.mark.parametrize("top_p", [0.3, 0.9, 1.0])
def test_probabilities_are_warped_by_temperature_then_top_k_then_top_p(temperature, top_k, top_p):
    logits_TV = 2 * torch.randn(4, 12, generator=torch.Generator().manual_seed(3))
    p_TV = chooser(Sampling(temperature, top_k, top_p)).probabilities(logits_TV, [0] * 4)
    expected = [warped(row, temperature=temperature, top_k=top_k, top_p=top_p) for row in logits_TV.numpy()]
    np.testing.assert_allclose(p_TV.numpy(), expected, atol=1e-6)


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.7},
        {"temperature": 1.3, "top_k": 9},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 0.9, "top_k": 20, "top_p": 0.7, "repetition_penalty": 1.3, "min_new_tokens": 6},
    ],
)
def test_the_distribution_of_every_step_is_the_one_generate_draws_from(verifier, settings):
    hf, prompt, eos = copy.deepcopy(verifier), [5, 9, 9, 17], [4, 60]
    hf.set_attn_implementation("sdpa")
    torch.manual_seed(0)
    out = hf.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 4, dtype=torch.long),
        do_sample=True,
        max_new_tokens=12,
        eos_token_id=eos,
        pad_token_id=0,
        output_scores=True,
        return_dict_in_generate=True,
        **{"top_k": 0, **settings},
    )
    ids = out.sequences[0].tolist()
    with torch.inference_mode():
        logits_TV = verifier(torch.tensor([ids]), use_cache=False).logits[0, len(prompt) - 1 : -1]
    mine = Chooser(Sampling(**settings), prompt_len=4, eos=eos, device="cpu")
    p_TV = mine.probabilities(logits_TV, ids[:-1])
    theirs = torch.cat(out.scores).softmax(-1)
    torch.testing.assert_close(p_TV, theirs, atol=1e-5, rtol=1e-4)


def test_a_drafter_of_fewer_ids_gives_the_others_no_chance():
    drafter = Drafter(None, torch.tensor([1, 4, 6]))
    spread = drafter.spread(torch.tensor([[0.0, 1.0, 2.0]]), 8)
    for sampling in (Sampling(1.0), Sampling(1.0, top_k=5), Sampling(1.0, top_p=0.9, repetition_penalty=1.3)):
        p_V = chooser(sampling).probabilities(spread, [1, 2])[0]
        assert p_V.sum() == pytest.approx(1.0)
        assert p_V[[0, 2, 3, 5, 7]].sum() == 0


# --- drawing


def test_a_draw_inverts_the_cumulated_weights_and_never_takes_a_weight_of_0():
    weights = torch.tensor([0.0, 0.25, 0.0, 0.75, 0.0])
    drawn = [draw(weights, u) for u in (0.0, 0.2499, 0.25, 0.9999999999999999, 1.0)]
    assert drawn == [1, 1, 3, 3, 3]
    assert draw(1e-30 * weights, 0.5) == 3


def test_every_entry_in_the_tail_of_a_large_vocabulary_can_be_drawn():
    # In fp32 sums near 1 are 1e-7 apart: most of these entries would never come.
    weights = torch.cat([torch.ones(1), torch.full((100_000,), 1e-8)])
    total, one = float(weights.double().sum()), float(weights[1])
    middles = {i: (1 + one * (i - 0.5)) / total for i in range(50_000, 50_040)}
    assert [draw(weights, u) for u in middles.values()] == list(middles)


# --- accepting: one token, values worked out by hand


def emitted(p_V, q_V, drawn_from, rng, draws=DRAWS):
    """Frequencies of the first token of a block of one draft, which comes from `drawn_from`."""
    p_GV = torch.stack([p_V, p_V])
    counts = np.zeros(len(p_V))
    drafts = np.searchsorted(np.cumsum(drawn_from), rng.random(draws) * sum(drawn_from), side="right").tolist()
    for token, us in zip(drafts, rng.random((draws, 2)).tolist(), strict=True):
        accepted, own = accept_sampled([token], p_GV, [q_V], us)
        counts[token if accepted else own] += 1
    return counts / draws


def test_b13_drafts_drawn_from_the_q_of_the_test_leave_p():
    """B13: p = [.5, .3, .2], q = [.2, .3, .5], 50,000 draws, within 0.009 (4 sigma)."""
    p, q, rng = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5]), np.random.default_rng(13)
    sampled = emitted(p, q, q.tolist(), rng)
    assert sampled == pytest.approx([0.5, 0.3, 0.2], abs=0.009)
    one_hot = emitted(p, torch.tensor([0.0, 0.0, 1.0]), [0, 0, 1], rng)
    assert one_hot == pytest.approx([0.5, 0.3, 0.2], abs=0.009)


def test_b13_argmax_drafts_against_a_soft_q_would_bias_the_text():
    """B13: the fault gives [.6, 0, .4]; so the q kept for the test must be the one drawn from."""
    p, q, rng = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.3, 0.5]), np.random.default_rng(13)
    assert emitted(p, q, [0, 0, 1], rng, 5_000) == pytest.approx([0.6, 0.0, 0.4], abs=0.03)


def test_b14_an_impossible_token_is_rejected_even_by_u_0():
    """B14: (1) p(x) = 0, u = 0."""
    p_GV = torch.tensor([[0.0, 1.0], [0.5, 0.5]])
    assert accept_sampled([0], p_GV, [torch.tensor([0.5, 0.5])], [0.0, 0.0]) == (0, 1)
    # And whatever p allows is accepted by u = 0, at its right position.
    p_GV = torch.tensor([[0.5, 0.5], [0.0, 1.0], [1.0, 0.0]])
    assert accept_sampled([0, 0], p_GV, [torch.tensor([1.0, 0.0])] * 2, [0.0, 0.0, 0.5]) == (1, 1)


def test_b14_disjoint_distributions_accept_nothing():
    """B14: (2) p = [1, 0], q = [0, 1], 1,000 draws."""
    p_GV, q = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0.0, 1.0])
    results = {accept_sampled([1], p_GV, [q], us) for us in np.random.default_rng(14).random((1000, 2)).tolist()}
    assert results == {(0, 0)}


@pytest.mark.parametrize(("p", "accepted"), [([0.5, 0.5], 1), ([0.0, 1.0], 0)])
@pytest.mark.parametrize("u", [0.0, 0.5, 1.0])
def test_b14_a_draft_its_own_drafter_excludes_is_no_division_by_0(p, accepted, u):
    """B14: (3) q(x) = 0 for the drafted token."""
    p_GV = torch.tensor([p, p])
    got, own = accept_sampled([0], p_GV, [torch.tensor([0.0, 1.0])], [u, 0.7])
    assert (got, own) == (accepted, 1)


@pytest.mark.parametrize("noise", [0.0, 1e-8])
@pytest.mark.parametrize("u", [0.0, 0.5, 1.0])
def test_b15_an_empty_residual_gives_a_token_of_p(noise, u):
    """B15: (1) p == q and u = 1.0; (2) p and q differ by noise of 1e-8 only."""
    p = torch.tensor([0.25, 0.5, 0.25, 0.0], dtype=torch.float64)
    q = p + noise * torch.tensor([1.0, -1.0, 0.0, 0.0], dtype=torch.float64)
    for dtype in (torch.float32, torch.float64):
        for token in (0, 1, 2):
            rows = torch.stack([p, p]).to(dtype)
            accepted, own = accept_sampled([token], rows, [q.to(dtype)], [1.0, u])
            assert accepted in (0, 1)
            assert own in (0, 1, 2)


def test_b15_the_one_entry_of_a_residual_is_always_drawn():
    """B15: (3) 49,152 entries, one of them not zero, 10,000 draws."""
    residual = torch.zeros(49_152)
    residual[31_415] = 1e-7
    assert {draw(residual, u) for u in np.random.default_rng(15).random(10_000)} == {31_415}
    q = torch.full((49_152,), 1 / 49_152)
    p = q / 2
    p[31_415] += 0.5
    rejected = {accept_sampled([7], torch.stack([p, p]), [q], [0.9, u]) for u in (0.0, 0.3, 0.999, 1.0)}
    assert rejected == {(0, 31_415)}


def test_b16_top_p_warps_both_distributions_before_the_test():
    """B16: (1) p = [.4, .35, .15, .1], top_p .7, drafter puts .9 on token 3: [.533, .467, 0, 0], never token 3."""
    how, rng = chooser(Sampling(1.0, top_p=0.7)), np.random.default_rng(16)
    p = how.probabilities(torch.tensor([[0.4, 0.35, 0.15, 0.1]]).log(), [0])[0]
    q = how.probabilities(torch.tensor([[0.04, 0.03, 0.03, 0.9]]).log(), [0])[0]
    frequencies = emitted(p, q, q.tolist(), rng)
    assert frequencies == pytest.approx([0.533, 0.467, 0, 0], abs=0.009)
    assert frequencies[2] == frequencies[3] == 0


# --- accepting: chi-square of blocks of two drafts

VOCAB = 8


@pytest.mark.parametrize("quality", ["good", "bad"])
@pytest.mark.parametrize(
    "settings", [{"temperature": 0.7}, {"temperature": 1.0, "top_k": 4}, {"temperature": 1.0, "top_p": 0.8}], ids=str
)
def test_tokens_of_a_block_have_the_verifiers_distribution(settings, quality):
    generator, rng = torch.Generator().manual_seed(2), np.random.default_rng(2)
    logits_GV = 1.5 * torch.randn(3, VOCAB, generator=generator)
    noise = 1.5 * torch.randn(3, VOCAB, generator=generator)
    drafter_GV = logits_GV + 0.3 * noise if quality == "good" else -logits_GV + noise
    how = chooser(Sampling(**settings))
    p_GV, q_GV = how.probabilities(logits_GV, [0] * 3), how.probabilities(drafter_GV, [0] * 3)
    exact = [warped(row, **settings) for row in logits_GV.numpy()]
    counts, accepted_in_all = np.zeros((3, VOCAB)), 0
    rows_GV, uniforms = q_GV.double(), rng.random((DRAWS, 5))
    drafts = [
        torch.searchsorted(rows_GV[i].cumsum(0), torch.tensor(uniforms[:, i] * float(rows_GV[i].sum()))) for i in (0, 1)
    ]
    for drafted, us in zip(torch.stack(drafts, 1).tolist(), uniforms[:, 2:].tolist(), strict=True):
        accepted, own = accept_sampled(drafted, p_GV, q_GV[:2], us)
        for i, token in enumerate([*drafted[:accepted], own]):
            counts[i, token] += 1
        accepted_in_all += accepted
    assert counts[0].sum() == DRAWS
    # Positions do not depend on each other here, so those reached have their own distribution too.
    for i in range(3):
        assert fits(counts[i], exact[i]) > LEAST_P, f"position {i}"
    # Expected number accepted: sums of min(p, q).
    overlap = torch.minimum(p_GV, q_GV).sum(1)
    assert accepted_in_all / DRAWS == pytest.approx(float(overlap[0] * (1 + overlap[1])), abs=0.015)
    assert (accepted_in_all / DRAWS > 1) == (quality == "good")


# --- the whole decoder

PROMPT = [3, 5, 3, 7, 1]
ROWS, REPEATS = 100, 4  # ROWS * REPEATS texts


@pytest.fixture(scope="module")
def small():
    return tiny_llama(vocab=12, layers=1, seed=5)


@pytest.fixture(scope="module")
def starts(small):
    return [prefill(small, PROMPT, new_tokens=4, gamma=3, chunk=64) for _ in range(ROWS)]


def texts(starts, drafter, rule, sampling, *, first_seed):
    """Texts of as many seeds as there are rows, times REPEATS, and the rounds of all of them."""
    out = [
        decode_batch(
            starts,
            drafter,
            cache_plan() if drafter else None,
            gamma=rule,
            new_tokens=4,
            eos={2},
            sampling=sampling,
            seeds=range(first_seed + ROWS * i, first_seed + ROWS * (i + 1)),
        )
        for i in range(REPEATS)
    ]
    rows = [row for batch in out for row in batch]
    return [row.tokens for row in rows], [r for row in rows for r in row.rounds]


def exact_next(model, sampling, ids):
    """The distribution after PROMPT and more, by a cache-free forward and definitions."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids]), use_cache=False, logits_to_keep=1).logits[0, -1].double().numpy()
    for token in set(ids):
        logits[token] *= sampling.repetition_penalty ** (-1 if logits[token] > 0 else 1)
    if len(ids) - len(PROMPT) < sampling.min_new_tokens:
        logits[2] = -np.inf
    return warped(logits, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p)


def exact_texts(model, sampling, length):
    """Probability of every text of `length` tokens (EOS, id 2, ends it sooner), by cache-free forwards."""
    known = {(): 1.0}
    for _ in range(length):
        longer = {}
        for text, chance in known.items():
            if 2 in text:
                longer[text] = chance
                continue
            ids = [*PROMPT, *text]
            p_V = exact_next(model, sampling, ids)
            longer |= {(*text, token): chance * p for token, p in enumerate(p_V) if p > 0}
        known = longer
    return known


def count(texts, outcomes):
    index = {text: i for i, text in enumerate(outcomes)}
    counts = np.zeros(len(outcomes))
    for text in texts:
        counts[index[text]] += 1  # a KeyError: a text that is impossible
    return counts


WITH_PENALTIES = Sampling(1.0, repetition_penalty=5.0, min_new_tokens=2)


@pytest.mark.parametrize(
    ("sampling", "mode", "noise"),
    [
        (Sampling(2.0, top_k=4), "fixed", 0.2),
        (Sampling(2.0, top_p=0.8), "confidence", 0.1),
        (WITH_PENALTIES, "fixed", 0.05),
        (WITH_PENALTIES, "confidence", 0.2),
    ],
)
def test_sampled_text_has_exactly_the_verifiers_distribution(small, starts, sampling, mode, noise):
    # The first three of four tokens: the prefill's, then drafts.
    drafter = Drafter(noisy_copy(small, noise), None)
    tokens, rounds = texts(starts, drafter, DraftRule(mode, 3, threshold=0.5), sampling, first_seed=1000)
    seen = [tuple(t[:3]) for t in tokens]
    for length in (1, 2, 3):
        exact = exact_texts(small, sampling, length)
        assert sum(exact.values()) == pytest.approx(1.0)
        assert fits(count([t[:length] for t in seen], exact), list(exact.values())) > LEAST_P
    drafted, accepted = sum(r.drafted for r in rounds), sum(r.accepted for r in rounds)
    assert 0.2 * drafted < accepted < 0.95 * drafted, "right and wrong, or the test shows little"
    assert any(r.drafted == 0 and r.emitted for r in rounds[::2]) or mode == "fixed"


@pytest.mark.parametrize("sampling", [WITH_PENALTIES, Sampling(2.0, top_k=4), Sampling(2.0, top_p=0.8)], ids=str)
def test_every_draft_is_tested_with_the_exact_p_and_q_after_the_drafts_before_it(small, starts, sampling, monkeypatch):
    drafter, verdict, accept, seen = Drafter(noisy_copy(small, 0.05), None), Row.verdict, accept_sampled, []

    def tested(drafted, p_GV, q_GV, uniforms):
        seen.append((list(drafted), p_GV.numpy(), [q.numpy() for q in q_GV]))
        assert len(p_GV) == len(uniforms) == len(drafted) + 1
        return accept(drafted, p_GV, q_GV, uniforms)

    monkeypatch.setattr(sequence, "accept_sampled", tested)
    before = []
    monkeypatch.setattr(Row, "verdict", lambda row, logits: before.append(row.sequence) or verdict(row, logits))
    how = {"gamma": 3, "new_tokens": 4, "eos": {2}, "sampling": sampling}
    decode_batch(starts[:10], drafter, cache_plan(), **how)
    assert sum(len(drafted) for drafted, _, _ in seen) > 15
    for ids, (drafted, p_GV, q_GV) in zip(before, seen, strict=True):
        for i, p_V in enumerate(p_GV):
            np.testing.assert_allclose(p_V, exact_next(small, sampling, [*ids, *drafted[:i]]), atol=1e-5)
        for i, q_V in enumerate(q_GV):
            np.testing.assert_allclose(q_V, exact_next(drafter.model, sampling, [*ids, *drafted[:i]]), atol=1e-5)


def test_sampled_text_with_a_drafter_and_without_are_drawn_alike(small, starts):
    drafter = Drafter(noisy_copy(small, 0.2), None)
    with_drafter, _ = texts(starts, drafter, DraftRule(gamma=3), WITH_PENALTIES, first_seed=0)
    alone, _ = texts(starts, None, DraftRule(gamma=0), WITH_PENALTIES, first_seed=50_000)
    outcomes = exact_texts(small, WITH_PENALTIES, 3)
    table = np.stack([count([tuple(t[:3]) for t in some], outcomes) for some in (with_drafter, alone)])
    often = table.sum(0) >= 10
    table = np.column_stack([table[:, often], table[:, ~often].sum(1)])
    assert chi2_contingency(table).pvalue > LEAST_P
    assert fits(count([tuple(t[:3]) for t in alone], outcomes), list(outcomes.values())) > LEAST_P


@pytest.mark.parametrize("mode", ["fixed", "confidence"])
def test_the_same_seed_gives_the_same_text_whoever_else_is_in_the_batch(small, mode):
    drafter, rule = Drafter(noisy_copy(small, 0.2), None), DraftRule(mode, 3)
    prompts = [[3], PROMPT, [1, 4, 4], [9] * 20]

    def run(which, seeds):
        batch = [prefill(small, prompts[i], new_tokens=20, gamma=3, chunk=64) for i in which]
        how = {"gamma": rule, "new_tokens": 20, "eos": NEVER, "sampling": Sampling(1.0), "seeds": seeds}
        return [row.tokens for row in decode_batch(batch, drafter, cache_plan(), **how)]

    together = run([0, 1, 2, 3], [7, 8, 9, 7])
    assert run([3, 0, 1], [7, 7, 8]) == [together[3], together[0], together[1]]
    for i, seed in enumerate([7, 8, 9, 7]):
        assert run([i], [seed]) == [together[i]]
    assert run([1], [9]) != [together[1]], "another seed, another text"


def test_rows_of_a_batch_need_caches_of_their_own(small):
    start = prefill(small, PROMPT, new_tokens=4, gamma=0, chunk=64)
    with pytest.raises(AssertionError, match="a prefilled cache of its own"):
        decode_batch([start, start], None, new_tokens=4, eos=NEVER)
