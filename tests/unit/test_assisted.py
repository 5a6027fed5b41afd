"""The library's own assisted generation as a method: its tokens are the verifier's, its rounds those of `sd_full`."""

import pytest
import torch
from torch import nn
from transformers import DynamicCache, Gemma2Config, Gemma2ForCausalLM

from bdcore.config import Config, GridConfig
from bdcore.decoding.assisted import decode_assisted
from bdcore.decoding.decoder import decode, prefill
from bdcore.documents import Prompt
from bdcore.evaluation.cell import measure_prompt
from bdcore.evaluation.grid import cells
from bdcore.evaluation.rows import Bench
from bdcore.kv.attention import NAME as ATTENTION
from bdcore.models.drafter import Drafter, slice_verifier
from bdcore.models.linear import BlockLinear, adapt
from bdcore.models.plain import plain_drafter, plain_model
from bdcore.models.stepper import CachePlan
from bdcore.schema import ROUNDS, SAMPLES, to_table
from tests.conftest import noisy_copy, tiny_llama
from tests.unit.test_decoder import NEVER, alone, fixed_prompt

NEW_TOKENS = 20
FULL_CACHE = CachePlan(0, prefill_chunk=64, extrapolate=True)


def assisted(verifier, drafter, length, *, gamma, new_tokens=NEW_TOKENS, eos=NEVER):
    return decode_assisted(verifier, drafter, fixed_prompt(length), gamma=gamma, new_tokens=new_tokens, eos=eos)


def ours(verifier, drafter, length, *, gamma, new_tokens=NEW_TOKENS, eos=NEVER):
    start = prefill(verifier, fixed_prompt(length), new_tokens=new_tokens, gamma=gamma, chunk=64)
    return decode(start, drafter, FULL_CACHE, gamma=gamma, new_tokens=new_tokens, eos=eos)


def counts(decoded):
    return [(r.drafted, r.accepted, r.emitted) for r in decoded.rounds]


@pytest.mark.parametrize("length", [1, 2, 40, 130])
def test_its_tokens_are_the_verifiers_and_its_rounds_those_of_full_speculation(verifier, noisy, length):
    text = alone(verifier, fixed_prompt(length), NEW_TOKENS)
    for gamma in (1, 3, 7):
        theirs, mine = assisted(verifier, noisy, length, gamma=gamma), ours(verifier, noisy, length, gamma=gamma)
        assert (theirs.tokens, theirs.finish_reason) == (text, "length")
        assert counts(theirs) == counts(mine)
        assert (theirs.drafted_at, theirs.accepted_at) == (mine.drafted_at, mine.accepted_at)
        assert 0 < sum(r.accepted for r in theirs.rounds) < sum(r.drafted for r in theirs.rounds)


def test_rounds_by_hand_of_a_twin(verifier, twin):
    """The first token is the prompt's; then blocks of 4 and the verifier's own; the last drafts what is left."""
    decoded = assisted(verifier, twin, 40, gamma=4, new_tokens=8)
    assert counts(decoded) == [(4, 4, 5), (1, 1, 2)]
    assert (decoded.drafted_at, decoded.accepted_at) == ([2, 1, 1, 1], [2, 1, 1, 1])
    assert counts(assisted(verifier, twin, 40, gamma=4, new_tokens=7)) == [(4, 4, 5), (0, 0, 1)]
    assert counts(assisted(verifier, twin, 40, gamma=4, new_tokens=1)) == []


@pytest.mark.parametrize("good", [True, False])
def test_a_pruned_head_drafts_ids_of_the_verifier(verifier, good):
    text = alone(verifier, fixed_prompt(40), NEW_TOKENS)
    ids = torch.tensor([i for i in range(128) if (i in text) == good])
    pruned = slice_verifier(verifier, [0, 1], ids=ids, rope_theta=None, max_positions=32)
    decoded = assisted(verifier, pruned, 40, gamma=4)
    assert decoded.tokens == text
    assert counts(decoded) == counts(ours(verifier, pruned, 40, gamma=4))
    assert sum(r.accepted for r in decoded.rounds) == (sum(r.drafted for r in decoded.rounds) if good else 0)
    assert pruned.model.lm_head.out_features == len(ids), "ours stays pruned"


@pytest.mark.parametrize("vocab", [64, 200])
def test_a_drafter_of_another_number_of_ids_drafts_all_the_same(verifier, vocab):
    drafter = Drafter(tiny_llama(vocab=vocab), torch.arange(min(vocab, 128)) if vocab > 128 else None)
    if vocab > 128:
        drafter.model.lm_head.weight = nn.Parameter(drafter.model.lm_head.weight[:128])
        drafter.model.lm_head.out_features = 128
    decoded = assisted(verifier, drafter, 40, gamma=4)
    assert decoded.tokens == alone(verifier, fixed_prompt(40), NEW_TOKENS)
    assert drafter.model.config.vocab_size == vocab


@pytest.mark.parametrize("k", [0, 1, 3, 4, 5, 9])
def test_eos_ends_it_and_an_eos_that_was_drafted_counts_as_accepted(verifier, twin, k):
    text = alone(verifier, fixed_prompt(40), NEW_TOKENS)
    eos = {text[k], 127 if 127 not in text else 126}
    decoded = assisted(verifier, twin, 40, gamma=4, eos=eos)
    assert (decoded.tokens, decoded.finish_reason) == (text[: text.index(text[k]) + 1], "eos")
    assert counts(decoded) == counts(ours(verifier, twin, 40, gamma=4, eos=eos))


def test_a_draft_that_ends_in_a_rejected_eos_is_shorter_than_ours(verifier, noisy):
    """The one difference in counts that the module's text names."""
    text = alone(verifier, fixed_prompt(40), NEW_TOKENS)
    fewer = 0
    for eos in (i for i in range(128) if i not in text):
        theirs, mine = assisted(verifier, noisy, 40, gamma=7, eos={eos}), ours(verifier, noisy, 40, gamma=7, eos={eos})
        assert theirs.tokens == mine.tokens == text
        pairs = list(zip(counts(theirs), counts(mine), strict=True))
        assert all(a[1:] == b[1:] and a[0] <= b[0] for a, b in pairs)
        fewer += any(a[0] < b[0] for a, b in pairs)
        if fewer:
            return
    raise AssertionError("no draft ended in a rejected EOS")


def test_models_are_the_librarys_over_the_same_weights_and_ours_stay_as_they_are(verifier, noisy):
    model = adapt(tiny_llama())
    before = model.generation_config.to_dict()
    twin = plain_model(model)
    assert {type(m) for m in twin.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
    assert twin.config._attn_implementation == "sdpa"
    assert all(a.data_ptr() == b.data_ptr() for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert assisted(model, noisy, 40, gamma=3).tokens == alone(verifier, fixed_prompt(40), NEW_TOKENS)
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {BlockLinear}
    assert model.config._attn_implementation == ATTENTION
    assert model.generation_config.to_dict() == before
    assert "_get_candidate_generator" not in vars(model)


def test_a_model_that_caps_its_logits_takes_the_librarys_eager_attention():
    torch.manual_seed(0)
    config = Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, head_dim=16,
        num_key_value_heads=1, attn_logit_softcapping=1.0, initializer_range=0.3, sliding_window=8, pad_token_id=0,
    )  # fmt: skip
    config._attn_implementation = ATTENTION
    model, ids = Gemma2ForCausalLM(config).eval(), torch.arange(3, 40)[None]
    twin = plain_model(model)
    assert twin.config._attn_implementation == "eager"
    with torch.inference_mode():
        torch.testing.assert_close(twin(ids).logits, model(ids, use_cache=False).logits, atol=1e-4, rtol=1e-4)
    drafter = Drafter(noisy_copy(model, 0.01), None)
    prompt = ids[0].tolist()
    theirs = decode_assisted(model, drafter, prompt, gamma=3, new_tokens=12, eos=NEVER)
    start = prefill(model, prompt, new_tokens=12, gamma=3, chunk=64)
    mine = decode(start, drafter, FULL_CACHE, gamma=3, new_tokens=12, eos=NEVER)
    assert theirs.tokens == mine.tokens and counts(theirs) == counts(mine)


def test_a_whole_head_prefers_what_the_pruned_one_prefers_in_its_own_dtype(verifier):
    pruned = slice_verifier(verifier, [0, 1], ids=torch.arange(3, 128, 2), rope_theta=None, max_positions=None)
    pruned.model.to(torch.bfloat16)
    whole = plain_drafter(pruned, 128)
    assert whole.lm_head.weight.dtype == torch.bfloat16 and whole.lm_head.out_features == 128
    hidden = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with torch.inference_mode():
        assert torch.equal(whole.lm_head(hidden).argmax(-1), pruned.to_ids(pruned.model.lm_head(hidden).argmax(-1)))


def test_seconds_and_bytes_are_of_the_phases_they_name(verifier, noisy, monkeypatch):
    """A clock that ticks once for every token that a model reads, and stands still otherwise."""
    clock = [0.0]
    monkeypatch.setattr("bdcore.decoding.assisted.time.perf_counter", lambda: clock[0])
    real = type(verifier).forward

    def ticking(self, input_ids, **kwargs):
        clock[0] += input_ids.shape[1]
        return real(self, input_ids, **kwargs)

    monkeypatch.setattr(type(verifier), "forward", ticking)
    decoded = assisted(verifier, noisy, 40, gamma=4)
    assert (decoded.prefill_s, decoded.draft_prefill_s, decoded.ttft_s) == (40, 39, 40)
    for r in decoded.rounds:
        assert r.verify_s == r.drafted + 1
        assert r.draft_s == (r.drafted + 1 if r.drafted else 0) or r is decoded.rounds[0]
        assert r.overhead_s == r.select_s == 0
    assert decoded.decode_s == sum(r.draft_s + r.verify_s for r in decoded.rounds)
    assert decoded.wall_s == clock[0]
    key_bytes = 2 * 2 * 2 * 16 * 4
    assert decoded.verifier_kv_bytes == key_bytes * (40 + NEW_TOKENS - 1)
    assert decoded.drafter_cached_peak <= 40 + NEW_TOKENS and decoded.drafter_kv_bytes % key_bytes == 0


def test_the_caches_are_the_librarys_own(verifier, noisy, monkeypatch):
    made, real = [], DynamicCache.__init__
    monkeypatch.setattr(DynamicCache, "__init__", lambda self, *a, **k: made.append(self) or real(self, *a, **k))
    assisted(verifier, noisy, 40, gamma=4)
    assert sorted(cache.get_seq_length() for cache in made)[-1] == 40 + NEW_TOKENS - 1
    assert len(made) == 2


def test_in_the_grid_it_is_a_row_beside_full_speculation_of_the_same_drafter(verifier, noisy, twin, prompt):
    grid = GridConfig(
        contexts=[40], budgets=[32], gammas=[2, 4], prompts=1, new_tokens=12,
        methods=["ar", "sd_full", "hf_assisted", "triforce"], workloads=["greedy", "sampled"],
    )  # fmt: skip

    class Tokenizer:
        def decode(self, ids):
            return " ".join(map(str, ids))

    bench = Bench(
        run_key="run",
        config=Config(grid=grid),
        verifier=verifier,
        tokenizer=Tokenizer(),
        drafters={"base": noisy, "trained": twin},
        drafter_keys={"base": "key-b", "trained": "key-t"},
        eos=frozenset(),
        device="cpu",
        dtype="float32",
    )
    every = cells(grid)
    samples, rounds = measure_prompt(bench, Prompt("doc", "stdlib", 0, prompt(40), truncated=True), every)
    assert to_table(samples, SAMPLES).num_rows == len(every) and to_table(rounds, ROUNDS).num_rows == len(rounds)
    assert {s["status"] for s in samples} == {"ok"}
    assert all(s["exact_match"] for s in samples if s["workload"] == "greedy")
    found = {(s["workload"], s["method"], s["gamma"]): s for s in samples}
    assert ("sampled", "hf_assisted", 4) not in found and ("sampled", "triforce", 4) in found
    for gamma in (2, 4):
        mine, theirs = found["greedy", "sd_full", gamma], found["greedy", "hf_assisted", gamma]
        same = ("rounds", "drafted", "accepted", "accepted_at", "accepted_spans", "budget", "policy", "drafter_key")
        assert {name: mine[name] for name in same} == {name: theirs[name] for name in same}
        assert all(theirs[name] > 0 for name in ("prefill_s", "draft_prefill_s", "ttft_s", "decode_s", "ar_decode_s"))
        two = found["greedy", "triforce", gamma]
        assert (two["drafter_key"], two["budget"], two["policy"]) == ("key-b", 32, "attention_mass")
