"""A model over its own cache: what a sparse cache computes, where its positions are, and that the budget is a bound."""

import copy
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from bdcore.kv.budget import STORES_ALL, Selection, prefill_piece
from bdcore.kv.selection import POLICIES
from bdcore.models.stepper import CachePlan, PositionError, Stepper
from tests.conftest import tiny_llama
from tests.unit.reference import InCacheReference, Survivors, causal, masked_logits, rotate

# Policies that drop keys, and need no verifier beside them.
BLIND = sorted(set(POLICIES) - {"oracle"} - STORES_ALL)
MODEL = tiny_llama()


def rule(policy="attention_mass", **changes):
    return Selection(policy, **{"chunk": 8, "sinks": 8, "recent": 8, "window": 8, **changes})


def sparse(budget=32, policy="attention_mass", mode="absolute", block=5, **changes):
    return CachePlan(0, budget, rule(policy), mode, block, **changes)


@cache
def grouped(kv_heads):
    """The tiny model with 4, 2 or 1 query heads per KV head."""
    config = copy.deepcopy(MODEL.config)
    config.num_key_value_heads = kv_heads
    torch.manual_seed(kv_heads)
    return LlamaForCausalLM(config).float().eval()


def positions_fed(model, call):
    """The position ids of every forward during `call`."""
    seen = []
    forward = model.model.rotary_emb.forward

    def watch(x, position_ids):
        seen.append(position_ids[0].tolist())
        return forward(x, position_ids)

    model.model.rotary_emb.forward = watch
    try:
        call()
    finally:
        model.model.rotary_emb.forward = forward
    return seen


# --- the full cache


@pytest.mark.parametrize("chunk", [1, 7, 32, 100])
def test_the_last_logits_of_a_prompt_do_not_depend_on_the_size_of_its_pieces(chunk, prompt):
    ids = prompt(100)
    stepper = Stepper(MODEL, CachePlan(capacity=100, prefill_chunk=chunk))
    expected = masked_logits(MODEL, ids, causal(MODEL, 100))[-1]
    torch.testing.assert_close(stepper.prefill(ids)[0], expected, atol=1e-5, rtol=0)
    assert (stepper.logical, stepper.physical) == (100, 100)


def test_tokens_fed_after_a_rollback_see_nothing_of_the_rejected_ones(prompt):
    ids, wrong = prompt(20), [5, 6, 7]
    stepper = Stepper(MODEL, CachePlan(capacity=32, block=4))
    stepper.prefill(ids[:16])
    stepper.feed([ids[16], *wrong])
    stepper.rollback(3)
    logits = stepper.feed(ids[17:])[0]
    torch.testing.assert_close(logits, masked_logits(MODEL, ids, causal(MODEL, 20))[17:], atol=1e-5, rtol=0)


# --- the sparse cache computes what the same keys compute under a mask


def pieces_of(plan, ids, blocks):
    """The prompt in the stepper's own pieces, then blocks."""
    s = plan.selection
    size = prefill_piece(plan.budget, chunk=s.chunk, sinks=s.sinks, recent=s.recent, most=plan.prefill_chunk)
    return [ids[i : i + size] for i in range(0, len(ids), size)] + blocks


def step_by_step(plan, pieces, model=MODEL):
    """(stepper, logits per piece, per piece the tokens each layer and head still cached before it)."""
    stepper = Stepper(model, plan)
    survivors, logits, kept = Survivors(stepper), [], []
    for piece in pieces:
        stepper.fit(len(piece))
        kept.append(list(survivors.alive))
        survivors.fed(stepper.logical, len(piece))
        logits.append(stepper.feed(piece)[0])
    return stepper, logits, kept


GROUPS = [(policy, 2) for policy in BLIND] + [("attention_mass", 1), ("attention_mass", 4)]


@pytest.mark.parametrize(("length", "blocks"), [(64, [5]), (128, [1, 1, 1])])
@pytest.mark.parametrize(("policy", "kv_heads"), GROUPS)
def test_sparse_logits_equal_full_keys_under_a_mask_that_hides_the_dropped_ones(
    policy, kv_heads, length, blocks, prompt
):
    """B10, B11 (absolute)."""
    model, plan, ids = grouped(kv_heads), sparse(policy=policy), prompt(length)
    pieces = pieces_of(plan, ids, [prompt(n) for n in blocks])
    _, logits, kept = step_by_step(plan, pieces, model)
    every = [token for piece in pieces for token in piece]
    T = len(every)
    visible = [torch.zeros(kv_heads, T, T, dtype=torch.bool) for _ in range(2)]
    start = 0
    for piece, alive in zip(pieces, kept, strict=True):
        end = start + len(piece)
        own = torch.ones(len(piece), len(piece), dtype=torch.bool).tril()
        for layer, heads in enumerate(alive):
            for head, index in enumerate(heads):
                visible[layer][head, start:end, index] = True
                visible[layer][head, start:end, start:end] = own
        start = end
    assert not visible[0][:, -1].all(), "nothing was dropped: the test would show nothing"
    torch.testing.assert_close(torch.cat(logits), masked_logits(model, every, visible), atol=1e-4, rtol=0)


@pytest.mark.parametrize(("length", "blocks"), [(64, [5]), (128, [1, 1, 1, 5, 3])])
@pytest.mark.parametrize(("policy", "kv_heads"), GROUPS)
def test_in_cache_logits_equal_unrotated_keys_rotated_to_0_to_n_before_every_read(
    policy, kv_heads, length, blocks, prompt
):
    """B10, B11 (cache-relative)."""
    model, plan = grouped(kv_heads), sparse(policy=policy, mode="in_cache")
    pieces = pieces_of(plan, prompt(length), [prompt(n) for n in blocks])
    _, logits, kept = step_by_step(plan, pieces, model)
    reference = InCacheReference(model)
    for piece, alive, mine in zip(pieces, kept, logits, strict=True):
        torch.testing.assert_close(mine, reference.feed(piece, alive), atol=1e-4, rtol=0)


def test_prefill_is_those_pieces(prompt):
    plan, ids = sparse(), prompt(90)
    _, logits, _ = step_by_step(plan, pieces_of(plan, ids, []))
    torch.testing.assert_close(Stepper(MODEL, plan).prefill(ids)[0], logits[-1][-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("mode", ["absolute", "in_cache"])
@pytest.mark.parametrize("policy", BLIND)
@pytest.mark.parametrize(("length", "budget"), [(5, 256), (50, 64), (64, 64)])
def test_a_prompt_within_the_budget_gives_the_dense_logits_bit_for_bit(mode, policy, length, budget, prompt):
    """B50, B11 (nothing evicted)."""
    ids, block = prompt(length), prompt(5)
    stepper = Stepper(MODEL, CachePlan(0, budget, rule(policy, chunk=16), mode, block=5))
    pieces = pieces_of(stepper.plan, ids, [])
    dense = Stepper(MODEL, CachePlan(capacity=512, block=5, prefill_chunk=len(pieces[0])))
    assert torch.equal(stepper.prefill(ids), dense.prefill(ids))
    assert torch.equal(stepper.feed(block), dense.feed(block)), "the block is in flight, nothing is dropped for it"
    assert stepper.physical == length + 5


@pytest.mark.parametrize("mode", ["absolute", "in_cache"])
@pytest.mark.parametrize(("chunk", "left"), [(8, 57), (16, 49)])
def test_one_token_over_the_budget_something_is_dropped(mode, chunk, left, prompt):
    """B50: and never the final partial chunk, here the last token."""
    stepper = Stepper(MODEL, CachePlan(0, 64, rule(chunk=chunk), mode))
    stepper.prefill(prompt(65))
    assert (stepper.logical, stepper.physical) == (65, left)
    assert all((layer.tokens[:, -1] == 64).all() for layer in stepper.cache.layers)


# --- positions


def test_absolute_positions_count_tokens_after_eviction(prompt):
    """B11, R07: from a counter, not from the length of a layer."""
    stepper = Stepper(MODEL, sparse(32))
    stepper.prefill(prompt(128))
    assert stepper.physical == 32
    seen = positions_fed(MODEL, lambda: [stepper.feed([token]) for token in (5, 6, 7)])
    assert seen == [[128], [129], [130]]


def test_in_cache_positions_count_cached_keys_after_eviction(prompt):
    """B11."""
    stepper = Stepper(MODEL, sparse(32, mode="in_cache"))
    stepper.prefill(prompt(128))
    seen = positions_fed(MODEL, lambda: [stepper.feed([token]) for token in (5, 6, 7)])
    assert seen == [[32], [33], [34]]


def test_in_cache_keys_are_the_unrotated_keys_at_0_to_31(prompt):
    """B11. In layer 0 a key depends on its token alone: both modes cache the same keys at different positions."""
    ids = prompt(128)
    modes = {mode: Stepper(MODEL, sparse(32, "sink_recent", mode)) for mode in ("absolute", "in_cache")}
    for stepper in modes.values():
        stepper.prefill(ids)
    kept = [*range(8), *range(104, 128)]
    inv_freq = MODEL.model.rotary_emb.inv_freq
    layer = MODEL.model.layers[0]
    with torch.no_grad():
        h = layer.input_layernorm(MODEL.model.embed_tokens(torch.tensor(ids)[kept]))
        raw = layer.self_attn.k_proj(h).view(32, 2, 16).transpose(0, 1)
    for mode, positions in (("absolute", torch.tensor(kept)), ("in_cache", torch.arange(32))):
        keys = modes[mode].cache.layers[0].view()[0][0]
        torch.testing.assert_close(keys, rotate(raw, positions, inv_freq), atol=1e-4, rtol=0)


def test_positions_beyond_the_model_are_refused_unless_extrapolation_is_named(prompt):
    model, ids = tiny_llama(max_positions=64), prompt(100)
    with pytest.raises(PositionError, match=r"beyond the model's 64; use position_mode = in_cache"):
        Stepper(model, sparse(32)).prefill(ids)
    Stepper(model, sparse(32, extrapolate=True)).prefill(ids)


def test_in_cache_positions_never_leave_a_short_drafter(prompt):
    model, ids = tiny_llama(max_positions=64), prompt(100)
    stepper = Stepper(model, sparse(32, mode="in_cache"))

    def run():
        stepper.prefill(ids)
        stepper.feed([5] * 5)

    assert max(max(p) for p in positions_fed(model, run)) < 32 + 5


# --- storage figures


def test_a_sparse_cache_holds_grouped_heads_within_the_budget_never_repeated_ones(prompt):
    """B20."""
    stepper = Stepper(MODEL, sparse(32))
    stepper.prefill(prompt(128))
    for layer in stepper.cache.layers:
        for tensor in layer.view():
            assert tensor.shape == (1, 2, 32, 16)
    assert stepper.cache.bytes() == 2 * 2 * 2 * (32 + 5) * 16 * 4  # K and V, layers, heads, budget + block, D, fp32


def test_a_full_cache_holds_every_token(prompt):
    stepper = Stepper(MODEL, CachePlan(capacity=140))
    stepper.prefill(prompt(128))
    assert stepper.cache.layers[0].view()[0].shape == (1, 2, 128, 16)


@pytest.mark.parametrize("policy", BLIND)
def test_a_prompt_of_256_in_pieces_of_32_never_holds_more_than_a_budget_of_64(policy, prompt):
    """B51."""
    stepper = Stepper(MODEL, sparse(64, policy, prefill_chunk=32))
    stepper.prefill(prompt(256))
    assert stepper.cache.peak_physical <= 64
    assert stepper.logical == 256
    stepper.feed(prompt(5))
    assert stepper.physical <= 64 + 5


@settings(max_examples=25, deadline=None)
@given(
    length=st.integers(1, 150),
    budget=st.integers(4, 12).map(lambda n: 8 * n),
    policy=st.sampled_from(sorted(set(BLIND) - {"no_sinks", "no_recent"})),  # these drop them on purpose
    mode=st.sampled_from(["absolute", "in_cache"]),
    drops=st.lists(st.integers(0, 5), min_size=1, max_size=8),
)
def test_sinks_and_newest_keys_stay_through_prefill_blocks_and_rollbacks(length, budget, policy, mode, drops):
    stepper = Stepper(MODEL, sparse(budget, policy, mode))
    survivors = Survivors(stepper)
    ids = torch.randint(3, 128, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for piece in pieces_of(stepper.plan, ids, []):
        stepper.fit(len(piece))
        survivors.fed(stepper.logical, len(piece))
        stepper.feed(piece)
        assert stepper.physical <= budget
    for drop in drops:
        survivors.fed(stepper.logical, 5)
        stepper.feed([7, 8, 9, 10, 11])
        stepper.rollback(drop)
        survivors.alive = [alive[:, : alive.shape[1] - drop] for alive in survivors.alive]
        stepper.fit()
        assert stepper.physical <= budget
        for alive in survivors.alive:
            for head in alive.tolist():
                assert len(head) == stepper.physical
                assert head == sorted(set(head)), "none twice, in order"
                assert set(range(min(8, stepper.logical))) <= set(head)
                assert set(range(max(0, stepper.logical - 8), stepper.logical)) <= set(head)


@pytest.mark.parametrize("mode", ["absolute", "in_cache"])
def test_the_observation_window_is_the_same_with_and_without_rejected_drafts(mode, prompt):
    """Queries of rejected tokens are gone, and enough older ones are left to fill the window."""
    ids, more = prompt(60), prompt(12)
    plain, rejecting = (Stepper(MODEL, sparse(64, mode=mode)) for _ in range(2))
    for stepper in (plain, rejecting):
        stepper.prefill(ids)
    for token in more:
        plain.feed([token])
        plain.fit()
        rejecting.feed([token, 9, 9, 9, 9])
        rejecting.rollback(4)
        rejecting.fit()
    assert plain.physical == rejecting.physical < plain.logical
    for mine, theirs in zip(plain.cache.layers, rejecting.cache.layers, strict=True):
        torch.testing.assert_close(mine.queries[:, :, -8:], theirs.queries[:, :, -8:], atol=1e-4, rtol=0)
        torch.testing.assert_close(mine.view()[0], theirs.view()[0], atol=1e-4, rtol=0)
