"""Speculative decoding against the verifier alone, and the ledger of both caches after every round."""

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bdcore.decoding import decoder, sequence
from bdcore.decoding.decoder import decode, first_mismatch, prefill
from bdcore.kv.budget import FULL, STORES_ALL, Selection
from bdcore.kv.selection import POLICIES
from bdcore.models.drafter import Drafter, slice_verifier
from bdcore.models.stepper import CachePlan, Stepper
from tests.conftest import tiny_llama
from tests.unit.reference import causal, masked_logits, rotate

NEVER = frozenset()
DROPPING = sorted(set(POLICIES) - STORES_ALL)


def cache_plan(budget=FULL, policy="attention_mass", mode="absolute"):
    return CachePlan(0, budget, Selection(policy), mode, prefill_chunk=64)


def alone(verifier, prompt, new_tokens, eos=NEVER):
    """The verifier's greedy text by cache-free forwards: knows nothing of the code under test but the model."""
    tokens = []
    while len(tokens) < new_tokens:
        with torch.inference_mode():
            logits = verifier(torch.tensor([[*prompt, *tokens]]), use_cache=False, logits_to_keep=1).logits
        tokens.append(int(logits[0, -1].argmax()))
        if tokens[-1] in eos:
            break
    return tokens


def speculate(verifier, drafter, prompt, *, gamma, new_tokens, plan=None, eos=NEVER, start=None):
    start = start or prefill(verifier, prompt, new_tokens=new_tokens, gamma=gamma, chunk=64, observe=8)
    return decode(start, drafter, plan or cache_plan(), gamma=gamma, new_tokens=new_tokens, eos=eos)


def acceptance(decoded):
    return sum(r.accepted for r in decoded.rounds) / sum(r.drafted for r in decoded.rounds)


@cache
def fixed_prompt(length):
    return torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(length)).tolist()


class Scripted(Drafter):
    """Feeds a real model, but proposes what the script says."""

    def __init__(self, model, script):
        super().__init__(model, None)
        self.script: Iterator[int] = iter(script)

    def to_ids(self, outputs):
        return torch.tensor(next(self.script))


def script(text, matches):
    """Drafts along `text` (prompt excluded, first token by the prefill): per round True where the draft is right."""
    at = 1
    for right in matches:
        for i, ok in enumerate(right):
            yield text[at + i] if ok else (text[at + i] + 1) % 128
        at += [*right, False].index(False) + 1


# --- lossless


LENGTHS, GAMMAS = (1, 5, 40, 130), (1, 4, 8)


@pytest.fixture(scope="module")
def baseline(verifier):
    return {length: alone(verifier, fixed_prompt(length), 40) for length in LENGTHS}


@pytest.mark.parametrize(
    ("policy", "budget", "mode"),
    [("attention_mass", FULL, "absolute"), ("attention_mass", FULL, "in_cache")]
    + [(p, b, "absolute") for p in sorted(POLICIES) for b in (32, 64)]
    + [(p, b, "in_cache") for p in DROPPING for b in (32, 64)],
)
def test_greedy_output_is_the_verifiers_own_token_for_token(verifier, noisy, baseline, policy, budget, mode):
    accepted = drafted = 0
    for length in LENGTHS:
        # Short prompts go on until the smaller budget evicts what was generated.
        new_tokens = 36 if length < budget == 32 else 12
        start = prefill(verifier, fixed_prompt(length), new_tokens=new_tokens, gamma=8, chunk=64, observe=8)
        for gamma in GAMMAS:
            plan = cache_plan(budget, policy, mode)
            decoded = speculate(
                verifier, noisy, fixed_prompt(length), gamma=gamma, new_tokens=new_tokens, plan=plan, start=start
            )
            assert decoded.tokens == baseline[length][:new_tokens], f"prompt {length}, gamma {gamma}"
            assert decoded.finish_reason == "length"
            accepted += sum(r.accepted for r in decoded.rounds)
            drafted += sum(r.drafted for r in decoded.rounds)
    assert 0 < accepted < drafted, "the drafter must be right and wrong, or the test shows little"


def test_without_a_drafter_it_is_the_verifier_alone(verifier, baseline):
    start = prefill(verifier, fixed_prompt(40), new_tokens=40, gamma=0, chunk=16)
    decoded = decode(start, None, new_tokens=40, eos=NEVER)
    assert decoded.tokens == baseline[40]
    assert len(decoded.gaps) == 40
    assert all(gap >= 0 for gap in decoded.gaps)
    assert {(r.drafted, r.accepted, r.emitted) for r in decoded.rounds} == {(0, 0, 1)}
    assert len(decoded.rounds) == 39
    assert decoded.drafter_kv_bytes == decoded.drafter_cached_peak == 0


def test_gaps_are_the_distance_of_the_two_best_logits(verifier, baseline):
    start = prefill(verifier, fixed_prompt(40), new_tokens=6, gamma=0, chunk=64)
    decoded = decode(start, None, new_tokens=6, eos=NEVER)
    ids = [*fixed_prompt(40), *baseline[40][:5]]
    best = masked_logits(verifier, ids, causal(verifier, len(ids)))[39:].topk(2).values
    assert decoded.gaps == pytest.approx((best[:, 0] - best[:, 1]).tolist(), abs=1e-4)


def test_one_prefill_serves_every_method_in_turn(verifier, twin, noisy, baseline):
    start = prefill(verifier, fixed_prompt(40), new_tokens=40, gamma=8, chunk=64)
    for drafter, gamma, plan in ((noisy, 8, None), (None, 0, None), (twin, 3, cache_plan(32)), (noisy, 1, None)):
        run = {"plan": plan} if drafter else {}
        decoded = (
            speculate(verifier, drafter, fixed_prompt(40), gamma=gamma, new_tokens=40, start=start, **run)
            if drafter
            else decode(start, None, new_tokens=40, eos=NEVER)
        )
        assert decoded.tokens == baseline[40]
        assert start.stepper.logical == start.stepper.physical == 40


def test_a_pruned_drafter_proposes_ids_of_the_verifier(verifier, baseline):
    ids = torch.tensor(sorted(set(baseline[40])))
    pruned = slice_verifier(verifier, [0, 1], ids=ids, rope_theta=None, max_positions=None)
    decoded = speculate(verifier, pruned, fixed_prompt(40), gamma=4, new_tokens=40)
    assert decoded.tokens == baseline[40]
    assert acceptance(decoded) == 1.0


def test_a_pruned_head_without_the_right_ids_costs_acceptance_not_correctness(verifier, baseline):
    ids = torch.tensor([i for i in range(128) if i not in baseline[40]])
    pruned = slice_verifier(verifier, [0, 1], ids=ids, rope_theta=None, max_positions=None)
    decoded = speculate(verifier, pruned, fixed_prompt(40), gamma=4, new_tokens=40)
    assert decoded.tokens == baseline[40]
    assert acceptance(decoded) == 0.0


# --- EOS


@pytest.mark.parametrize("k", range(18))
def test_eos_accepted_inside_a_block_stops_there_and_nothing_after_it_is_counted(verifier, twin, baseline, k, watched):
    text = baseline[40][:24]
    eos = {text[k]}
    expected = text[: text.index(text[k]) + 1]
    decoded = speculate(verifier, twin, fixed_prompt(40), gamma=8, new_tokens=24, eos=eos)
    assert decoded.tokens == expected
    assert decoded.finish_reason == "eos"
    assert sum(r.emitted for r in decoded.rounds) == len(expected) - 1
    for r in decoded.rounds:
        assert r.accepted <= r.emitted
        assert r.drafted == r.accepted, "every draft of a twin is accepted, those after EOS are not counted"
    assert sum(decoded.drafted_at) == sum(r.drafted for r in decoded.rounds)
    assert sum(decoded.accepted_at) == sum(r.accepted for r in decoded.rounds)
    start = prefill(verifier, fixed_prompt(40), new_tokens=24, gamma=0, chunk=64)
    assert decode(start, None, new_tokens=24, eos=eos).tokens == expected
    for stepper in watched[1:2]:  # the drafter's
        assert stepper.seq == [*fixed_prompt(40), *expected][: stepper.logical]
        assert stepper.logical < 40 + len(expected)


def test_eos_as_the_first_token_ends_at_once(verifier, twin):
    text = alone(verifier, fixed_prompt(40), 1)
    decoded = speculate(verifier, twin, fixed_prompt(40), gamma=8, new_tokens=24, eos=set(text))
    assert (decoded.tokens, decoded.finish_reason, decoded.rounds) == (text, "eos", [])


def test_eos_in_the_prompt_does_not_stop(verifier, twin):
    text = alone(verifier, fixed_prompt(40), 24)
    eos = next(i for i in range(128) if i not in text)
    prompt = [eos, *fixed_prompt(40), eos]
    expected = alone(verifier, prompt, 24, {eos})
    decoded = speculate(verifier, twin, prompt, gamma=8, new_tokens=24, eos={eos})
    assert decoded.tokens == expected
    assert len(decoded.tokens) > 1


def test_eos_that_is_drafted_but_rejected_does_not_stop(verifier):
    text = alone(verifier, fixed_prompt(40), 12)
    wrong = next(i for i in range(128) if i not in text)
    drafter = Scripted(verifier, iter(lambda: wrong, None))
    decoded = speculate(verifier, drafter, fixed_prompt(40), gamma=4, new_tokens=12, eos={wrong})
    assert (decoded.tokens, decoded.finish_reason) == (text, "length")
    assert acceptance(decoded) == 0.0


# --- the limit


@pytest.mark.parametrize("new_tokens", [1, 4, 5, 6, 7, 12])
def test_the_limit_is_exact(verifier, twin, new_tokens):
    decoded = speculate(verifier, twin, fixed_prompt(40), gamma=4, new_tokens=new_tokens)
    assert decoded.tokens == alone(verifier, fixed_prompt(40), new_tokens)
    assert decoded.finish_reason == "length"
    assert all(r.accepted <= r.emitted for r in decoded.rounds)


def test_the_last_round_drafts_only_what_the_limit_leaves_room_for(verifier, twin):
    # The prefill gives the first token, then a full round of 5; two are left: one draft and the verifier's own.
    decoded = speculate(verifier, twin, fixed_prompt(40), gamma=4, new_tokens=8)
    assert [(r.drafted, r.accepted, r.emitted) for r in decoded.rounds] == [(4, 4, 5), (1, 1, 2)]
    decoded = speculate(verifier, twin, fixed_prompt(40), gamma=4, new_tokens=7)
    assert [(r.drafted, r.accepted, r.emitted) for r in decoded.rounds] == [(4, 4, 5), (0, 0, 1)]


# --- acceptance


@pytest.mark.parametrize("gamma", range(1, 7))
def test_every_draft_of_a_twin_with_the_full_cache_is_accepted(verifier, twin, gamma, ledger):
    """B04; the ledger I2 is checked before every step."""
    decoded = speculate(verifier, twin, fixed_prompt(40), gamma=gamma, new_tokens=64)
    assert acceptance(decoded) == 1.0
    full = decoded.rounds[: 63 // (gamma + 1)]
    assert {(r.drafted, r.accepted, r.emitted) for r in full} == {(gamma, gamma, gamma + 1)}
    assert ledger == [sum(r.drafted for r in decoded.rounds), len(decoded.rounds)]


@pytest.mark.parametrize("mode", ["absolute", "in_cache"])
@pytest.mark.parametrize(
    ("length", "budget", "chunk", "new_tokens"), [(5, 96, 8, 40), (5, 256, 16, 40), (50, 64, 16, 14), (64, 64, 16, 6)]
)
def test_every_draft_of_a_twin_is_accepted_while_the_budget_holds_everything(
    verifier, twin, length, budget, chunk, new_tokens, mode
):
    """B50; a prompt as long as the budget leaves room for the block in flight alone: one round."""
    plan = CachePlan(0, budget, Selection("attention_mass", chunk=chunk), mode, prefill_chunk=64)
    decoded = speculate(verifier, twin, fixed_prompt(length), gamma=4, new_tokens=new_tokens, plan=plan)
    assert acceptance(decoded) == 1.0


def test_counts_are_of_drafts_by_round_and_by_position(verifier):
    text = alone(verifier, fixed_prompt(40), 8)
    drafter = Scripted(verifier, script(text + [0] * 8, [[True, False, True, True], [True] * 4]))
    decoded = speculate(verifier, drafter, fixed_prompt(40), gamma=4, new_tokens=8)
    assert decoded.tokens == text
    assert [(r.drafted, r.accepted, r.emitted) for r in decoded.rounds] == [(4, 1, 2), (4, 4, 5)]
    assert acceptance(decoded) == 0.625
    assert decoded.drafted_at == [2, 2, 2, 2]
    assert decoded.accepted_at == [2, 1, 1, 1]
    assert sum(r.emitted for r in decoded.rounds) / len(decoded.rounds) == 3.5


def test_a_short_last_round_counts_only_what_was_drafted(verifier):
    text = alone(verifier, fixed_prompt(40), 6)
    drafter = Scripted(verifier, script(text + [0] * 8, [[True, False, True, True], [True, True]]))
    decoded = speculate(verifier, drafter, fixed_prompt(40), gamma=4, new_tokens=6)
    assert [(r.drafted, r.accepted) for r in decoded.rounds] == [(4, 1), (2, 2)]
    assert decoded.drafted_at == [2, 2, 1, 1]
    assert decoded.accepted_at == [2, 1, 0, 0]


# --- the ledger of both caches


class Watched(Stepper):
    """Remembers the tokens it was fed and its logits; `after_round` is called where the drafter is settled."""

    made: list["Watched"] = []  # noqa: RUF012

    def __init__(self, model, plan, **more):
        super().__init__(model, plan, **more)
        self.seq, self.logits, self.settled = [], [], []
        self.made.append(self)

    def _forward(self, ids, *, last_only):
        assert self.logical == len(self.seq), "fed length and sequence agree before every step"
        self.seq += ids[0].tolist()
        out = super()._forward(ids, last_only=last_only)
        self.logits.append((len(self.seq), out[0, -1].clone(), list(self.seq)))
        return out

    def rollback(self, n):
        super().rollback(n)
        self.seq = self.seq[: len(self.seq) - n]
        assert self.logical == len(self.seq)

    def fit(self, incoming=0):
        super().fit(incoming)
        if not incoming:
            self.settled.append((self.logical, self.physical))


@pytest.fixture
def watched(monkeypatch):
    """[0] is the verifier's stepper, [1] the drafter's."""
    monkeypatch.setattr(Watched, "made", [])
    monkeypatch.setattr(decoder, "Stepper", Watched)
    monkeypatch.setattr(sequence, "Stepper", Watched)
    return Watched.made


def keep_ledger(monkeypatch):
    """I2 from now on: before every draft and verify step, what is cached and what is fed make up the sequence. Returns
    the number of steps checked so far, [drafting, verifying].
    """
    steps, propose, feed = [0, 0], decoder.propose, decoder.feed_together
    rows = []

    def proposing(live):
        rows[:] = live
        propose(live)

    def feeding(steppers, blocks, *, last_only=False):
        for stepper, block in zip(steppers, blocks, strict=True):
            row = next(r for r in rows if stepper in (r.verifier, getattr(r.proposer, "stepper", None)))
            every = [*row.sequence, *row.draft]
            assert stepper.logical + len(block) == len(every)
            assert list(block) == every[stepper.logical :]
            assert all(layer.physical == stepper.physical for layer in stepper.cache.layers)
            steps[stepper is row.verifier] += 1
        return feed(steppers, blocks, last_only=last_only)

    monkeypatch.setattr(decoder, "propose", proposing)
    monkeypatch.setattr(decoder, "feed_together", feeding)
    return steps


@pytest.fixture(autouse=True)
def ledger(monkeypatch):
    """Every generation of this file keeps the ledger."""
    return keep_ledger(monkeypatch)


def right_then_wrong(gamma, counts):
    return [[True] * n + [False] * (gamma - n) for n in counts]


def test_after_0_to_4_accepted_drafts_the_drafter_computes_what_a_cache_free_forward_does(verifier, noisy, watched):
    """B05 (1); the ledger I2 is checked before every step."""
    prompt, counts = fixed_prompt(40), [0, 1, 2, 3, 4, 0, 4, 2, 4]
    text = alone(verifier, prompt, 1 + sum(counts) + len(counts))
    drafter = Scripted(noisy.model, script(text + [0] * 8, right_then_wrong(4, counts)))
    decoded = speculate(verifier, drafter, prompt, gamma=4, new_tokens=len(text))
    assert decoded.tokens == text
    assert [r.accepted for r in decoded.rounds] == counts
    assert len(watched[1].logits) == 1 + 4 * len(counts)
    for stepper, model in ((watched[0], verifier), (watched[1], noisy.model)):
        for _, logits, seq in stepper.logits:
            expected = masked_logits(model, seq, causal(model, len(seq)))[-1]
            torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("budget", [FULL, 32])
def test_a_one_token_prompt_is_no_exception(verifier, noisy, budget):
    """B05 (2)."""
    decoded = speculate(verifier, noisy, [10], gamma=4, new_tokens=48, plan=cache_plan(budget))
    assert decoded.tokens == alone(verifier, [10], 48)


@pytest.mark.parametrize("counts", [[1, 1, 0, 1], [4, 1, 4, 0], [0, 0, 0, 1]])
def test_no_row_of_a_rejected_draft_stays_in_a_full_cache(verifier, noisy, watched, counts):
    """R03, with a full cache."""
    prompt = fixed_prompt(40)
    text = alone(verifier, prompt, 1 + sum(counts) + len(counts))
    drafter = Scripted(noisy.model, script(text + [0] * 8, right_then_wrong(4, counts)))
    speculate(verifier, drafter, prompt, gamma=4, new_tokens=len(text))
    stepper = watched[1]
    every = [*prompt, *text]
    assert stepper.seq == every[: stepper.logical]
    assert stepper.physical == stepper.logical < len(every)
    clean = Stepper(noisy.model, CachePlan(capacity=len(every)))
    clean.prefill(stepper.seq)
    for mine, theirs in zip(stepper.cache.layers, clean.cache.layers, strict=True):
        for a, b in zip(mine.view(), theirs.view(), strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_row_of_a_rejected_draft_and_no_row_twice_stays_in_a_sparse_cache(verifier, noisy, watched, policy):
    """R03."""
    prompt = fixed_prompt(130)
    decoded = speculate(verifier, noisy, prompt, gamma=4, new_tokens=40, plan=cache_plan(32, policy))
    assert any(r.accepted < r.drafted for r in decoded.rounds)
    stepper, every = watched[1], [*prompt, *decoded.tokens]
    # In layer 0 a key depends on its token and position alone: it says which token it is of.
    layer = noisy.model.model.layers[0]
    with torch.no_grad():
        raw = layer.self_attn.k_proj(layer.input_layernorm(noisy.model.model.embed_tokens(torch.tensor(every))))
    true = rotate(raw.view(len(every), 2, 16).transpose(0, 1), torch.arange(len(every)), layer_frequencies(noisy))
    cached = stepper.cache.layers[0].view()[0][0]
    for head in range(2):
        distance, token = torch.cdist(cached[head], true[head]).min(1)
        assert distance.max() < 1e-2
        assert len(set(token.tolist())) == stepper.physical, "no token twice"
        assert token.max() < len(every) - 1
        assert token.max() == stepper.logical - 1


def layer_frequencies(drafter):
    return drafter.model.model.rotary_emb.inv_freq


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    length=st.integers(1, 150),
    budget=st.integers(4, 12).map(lambda n: 8 * n),
    gamma=st.integers(1, 8),
    policy=st.sampled_from(DROPPING),
    mode=st.sampled_from(["absolute", "in_cache"]),
)
def test_the_budget_is_a_bound_for_the_whole_generation(verifier, noisy, watched, length, budget, gamma, policy, mode):
    watched.clear()
    prompt, plan = fixed_prompt(length), cache_plan(budget, policy, mode)
    decoded = speculate(verifier, noisy, prompt, gamma=gamma, new_tokens=24, plan=plan)
    every = [*prompt, *decoded.tokens]
    stepper = watched[1]
    assert stepper.settled[0] == (length, stepper.settled[0][1])
    assert all(physical <= budget for _, physical in stepper.settled)
    assert all(r.drafter_cached <= budget for r in decoded.rounds)
    assert decoded.drafter_cached_peak <= budget + gamma + 1
    assert stepper.seq == every[: stepper.logical]
    emitted = 1
    for r, (logical, _) in zip(decoded.rounds, stepper.settled[1:], strict=True):
        emitted += r.emitted
        # Never ahead of the sequence without its last token; behind by one after a fully accepted round, and by what
        # the round emitted when there was nothing to draft.
        behind = length + emitted - 1 - logical
        assert behind == (r.drafted == r.accepted) if r.drafted else behind >= 0
    assert decoded.drafter_kv_bytes == 2 * 2 * 2 * (budget + max(gamma + 1, 2)) * 16 * 4


def test_the_final_tokens_after_prefill_of_a_small_budget_are_within_it(verifier, noisy, watched):
    speculate(verifier, noisy, fixed_prompt(130), gamma=4, new_tokens=1, plan=cache_plan(32))
    assert watched[1].settled[-1] == (130, watched[1].physical)
    assert watched[1].cache.peak_physical <= 32


# --- records


def test_phases_are_measured_and_add_up(verifier, noisy):
    decoded = speculate(verifier, noisy, fixed_prompt(130), gamma=4, new_tokens=40, plan=cache_plan(32))
    for r in decoded.rounds:
        assert min(r.draft_s, r.select_s, r.verify_s, r.overhead_s) >= 0
    phases = sum(r.draft_s + r.select_s + r.verify_s + r.overhead_s for r in decoded.rounds)
    assert phases == pytest.approx(decoded.decode_s)
    assert sum(r.select_s for r in decoded.rounds) > 0
    assert decoded.wall_s == decoded.prefill_s + decoded.draft_prefill_s + decoded.decode_s
    assert decoded.ttft_s == decoded.prefill_s > 0


def test_tokens_are_streamed_as_they_are_committed(verifier, noisy):
    told = []
    start = prefill(verifier, fixed_prompt(5), new_tokens=20, gamma=4, chunk=64)
    decoded = decode(
        start, noisy, cache_plan(), gamma=4, new_tokens=20, eos=NEVER, on_tokens=lambda t: told.append(list(t))
    )
    assert [len(t) for t in told] == [1] + [r.emitted for r in decoded.rounds]
    assert [token for tokens in told for token in tokens] == decoded.tokens


@pytest.mark.parametrize(
    ("tokens", "reference", "index"),
    [([1, 2], [1, 2], None), ([1, 3], [1, 2], 1), ([1], [1, 2], 1), ([1, 2, 3], [1, 2], 2), ([], [], None)],
)
def test_the_first_mismatch_counts_lengths_too(tokens, reference, index):
    assert first_mismatch(tokens, reference) == index


def test_a_tied_verifier_with_a_one_layer_slice_is_lossless_too():
    verifier = tiny_llama(tie_word_embeddings=True, seed=4)
    drafter = slice_verifier(verifier, [0], ids=None, rope_theta=None, max_positions=None)
    decoded = speculate(verifier, drafter, fixed_prompt(40), gamma=4, new_tokens=40, plan=cache_plan(32))
    assert decoded.tokens == alone(verifier, fixed_prompt(40), 40)


def test_a_padding_id_that_a_smaller_drafter_cannot_read_ends_its_drafting_not_the_text(verifier):
    """The verifier's head has rows beyond the shared vocabulary, and emits one of them."""
    small = Drafter(tiny_llama(vocab=64), None)
    prompt = [i % 64 for i in fixed_prompt(40)]
    expected = alone(verifier, prompt, 24)
    unreadable = next(i for i, token in enumerate(expected) if token >= 64)
    decoded = speculate(verifier, small, prompt, gamma=4, new_tokens=24)
    assert decoded.tokens == expected
    assert sum(r.emitted for r in decoded.rounds if r.drafted) <= unreadable
    assert decoded.rounds[-1].drafted == 0
