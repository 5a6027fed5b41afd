"""Repetition penalty and the rule against an early EOS: the same tokens and distributions as without a drafter."""

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bdcore.decoding.decoder import decode, prefill
from bdcore.decoding.sampling import Chooser, Sampling
from bdcore.kv.budget import FULL
from tests.unit.test_decoder import NEVER, acceptance, cache_plan

PROMPT = [5, 5, 5, 7]
GAMMAS = (1, 4, 8)


def penalised(logits_V, seen, penalty):
    """The penalty by its definition: positive logits divided, negative ones multiplied, for every token seen."""
    scores = logits_V.double().clone()
    for token in set(seen):
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    return scores


def alone(verifier, new_tokens, *, penalty=1.0, least=0, eos=NEVER):
    """Greedy text under both rules by cache-free forwards: knows nothing of the code under test but the model."""
    tokens = []
    while len(tokens) < new_tokens:
        with torch.inference_mode():
            logits = verifier(torch.tensor([[*PROMPT, *tokens]]), use_cache=False, logits_to_keep=1).logits[0, -1]
        scores = penalised(logits, [*PROMPT, *tokens], penalty)
        if len(tokens) < least:
            scores[list(eos)] = -torch.inf
        tokens.append(int(scores.argmax()))
        if tokens[-1] in eos:
            break
    return tokens


def generate(verifier, new_tokens, **settings):
    hf = copy.deepcopy(verifier)
    hf.set_attn_implementation("sdpa")
    ids = torch.tensor([PROMPT])
    settings = {"eos_token_id": None, "pad_token_id": 0, "do_sample": False, **settings}
    out = hf.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, **settings)
    return out[0, len(PROMPT) :].tolist()


def run(verifier, drafter, sampling, *, gamma=0, new_tokens=40, eos=NEVER, budget=FULL):
    start = prefill(verifier, PROMPT, new_tokens=new_tokens, gamma=gamma, chunk=64)
    plan = cache_plan(budget)
    return decode(start, drafter, plan, gamma=gamma, new_tokens=new_tokens, eos=eos, sampling=sampling)


@pytest.mark.parametrize("budget", [FULL, 32])
def test_b17_repetition_penalty_gives_the_verifiers_own_text_whatever_gamma(verifier, twin, noisy, budget):
    """B17: prompt [5, 5, 5, 7], penalty 1.3, noisy drafter, 40 tokens, gamma 1, 4 and 8."""
    sampling = Sampling(repetition_penalty=1.3)
    expected = alone(verifier, 40, penalty=1.3)
    assert expected != alone(verifier, 40), "the penalty must matter"
    assert generate(verifier, 40, repetition_penalty=1.3) == expected
    assert run(verifier, None, sampling).tokens == expected
    for gamma in GAMMAS:
        decoded = run(verifier, noisy, sampling, gamma=gamma, budget=budget)
        assert decoded.tokens == expected
        assert 0 < acceptance(decoded) < 1
        if budget == FULL:  # the drafter's drafts are penalised too, each for those before it
            assert acceptance(run(verifier, twin, sampling, gamma=gamma)) == 1.0


@pytest.mark.parametrize("penalty", [1.0, 1.3, 0.8])
def test_b17_min_new_tokens_10_gives_the_verifiers_own_text_whatever_gamma(verifier, twin, noisy, penalty):
    """B17: also min_new_tokens 10; EOS is what the verifier would say early."""
    eos = {alone(verifier, 40, penalty=penalty)[3]}
    sampling = Sampling(repetition_penalty=penalty, min_new_tokens=10)
    expected = alone(verifier, 40, penalty=penalty, least=10, eos=eos)
    assert len(expected) >= 10
    assert generate(verifier, 40, repetition_penalty=penalty, min_new_tokens=10, eos_token_id=list(eos)) == expected
    assert run(verifier, None, sampling, eos=eos).tokens == expected
    for gamma in GAMMAS:
        assert run(verifier, noisy, sampling, gamma=gamma, eos=eos).tokens == expected
        decoded = run(verifier, twin, sampling, gamma=gamma, eos=eos)
        assert decoded.tokens == expected
        assert acceptance(decoded) == 1.0


@given(
    prompt=st.lists(st.integers(0, 11), min_size=1, max_size=6),
    new=st.lists(st.integers(0, 11), max_size=6),
    drafts=st.lists(st.integers(0, 11), max_size=6),
    penalty=st.sampled_from([0.7, 1.0, 1.3]),
    least=st.integers(0, 12),
    temperature=st.sampled_from([0.0, 0.7]),
)
def test_each_position_of_a_block_sees_exactly_the_tokens_before_it(prompt, new, drafts, penalty, least, temperature):
    sampling = Sampling(temperature=temperature, repetition_penalty=penalty, min_new_tokens=least)
    chooser = Chooser(sampling, prompt_len=len(prompt), eos={2, 3}, device="cpu")
    logits_TV = torch.randn(len(drafts) + 1, 12, generator=torch.Generator().manual_seed(len(new)))
    before = logits_TV.clone()
    scores_TV = chooser.scores(logits_TV, [*prompt, *new, *drafts])
    for i in range(len(drafts) + 1):
        expected_V = penalised(logits_TV[i], [*prompt, *new, *drafts[:i]], penalty)
        if len(new) + i < least:
            expected_V[[2, 3]] = -torch.inf
        torch.testing.assert_close(scores_TV[i].double(), expected_V, atol=1e-6, rtol=1e-6)
        best = chooser.best(logits_TV, [*prompt, *new, *drafts])[i]
        assert best == int(scores_TV[i].argmax())
        if temperature:
            p_TV = chooser.probabilities(logits_TV, [*prompt, *new, *drafts])
            torch.testing.assert_close(p_TV[i].double(), (expected_V / temperature).softmax(-1), atol=1e-6, rtol=1e-5)
    assert torch.equal(logits_TV, before), "the logits themselves are left alone"


def test_no_eos_leaves_nothing_to_hold_back():
    assert Chooser(Sampling(min_new_tokens=5), prompt_len=1, eos=frozenset(), device="cpu").plain
