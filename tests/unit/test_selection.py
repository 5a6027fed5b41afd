"""Which keys stay: policies on hand-made scores, the bound, and which budgets are legal."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from bdcore.kv.budget import FULL, Selection, check_budget, forced_chunks, parse_budget, prefill_piece
from bdcore.kv.selection import POLICIES, Evidence, chunk_scores, select, window_mass
from bdcore.kv.storage import KVStorage
from tests.conftest import tiny_llama

# Policies that need no verifier beside them.
BLIND = sorted(set(POLICIES) - {"oracle"})
# Policies that keep sinks and recent keys by rule.
KEEPING = sorted(set(BLIND) - {"no_sinks", "no_recent"})


def kept(keys, queries=None, *, budget, **rule):
    queries = keys if queries is None else queries
    return select(Evidence(queries, keys, 1.0), budget=budget, selection=Selection(**rule))


def random_keys(T, heads=2, D=4, seed=0):
    return torch.randn(1, heads, T, D, generator=torch.Generator().manual_seed(seed))


# --- policies


def test_sink_recent_keeps_the_first_and_the_newest_chunks():
    index = kept(random_keys(10), budget=8, policy="sink_recent", chunk=2, sinks=2, recent=2)
    assert index.tolist() == [[[0, 1, 4, 5, 6, 7, 8, 9]] * 2]


def test_attention_mass_keeps_the_chunk_that_the_window_attends_to():
    keys = torch.zeros(1, 1, 10, 4)
    keys[0, 0, 3] = torch.tensor([5.0, 0, 0, 0])  # chunk 1
    queries = torch.tensor([5.0, 0, 0, 0]).expand(1, 1, 2, 4)
    index = kept(keys, queries, budget=6, policy="attention_mass", chunk=2, sinks=2, recent=2, window=2)
    assert index.tolist() == [[[0, 1, 2, 3, 8, 9]]]


def test_a_chunk_counts_with_the_sum_of_its_keys_not_with_its_best_key():
    weights = torch.tensor([0.01, 0.01, 0.30, 0.01, 0.20, 0.20, 0.02, 0.02, 0.11, 0.12])
    keys = weights.log()[None, None, :, None]
    index = kept(keys, torch.ones(1, 1, 1, 1), budget=6, policy="attention_mass", chunk=2, sinks=2, recent=2, window=1)
    assert index.tolist() == [[[0, 1, 4, 5, 8, 9]]]


def test_each_kv_head_keeps_its_own_set_and_a_group_keeps_the_mean_of_its_queries():
    """B20."""
    # KV head 0: one query head wants chunk 1 with .9, the other chunk 2 with .6 and chunk 1 with .1: 1 wins by mean.
    # KV head 1: both want chunk 3.
    want = torch.full((4, 10), 1e-6)
    want[0, 2], want[0, 4] = 0.9, 0.1
    want[1, 4], want[1, 2], want[1, 6] = 0.6, 0.1, 0.3
    want[2, 6] = want[3, 6] = 1.0
    # One key dimension per query head of a group lets each head have its own weights.
    keys = torch.stack([want[:2].log().T, want[2:].log().T])[None]  # (1, H, T, D = G)
    queries = torch.tensor([[1.0, 0], [0, 1.0], [1.0, 0], [0, 1.0]])[None, :, None]  # (1, Q, W = 1, D)
    index = kept(keys, queries, budget=6, policy="attention_mass", chunk=2, sinks=2, recent=2, window=1)
    assert index[0, 0].tolist() == [0, 1, 2, 3, 8, 9]
    assert index[0, 1].tolist() == [0, 1, 6, 7, 8, 9]


def test_last_key_compares_the_newest_key_with_the_mean_key_of_each_chunk():
    keys = torch.zeros(1, 1, 9, 2)
    keys[0, 0, :, 0] = torch.tensor([0, 0, 9.0, -9.0, 2.0, 2.0, 1.0, 1.0, 1.0])  # means 0, 0, 2, 1, (1)
    index = kept(keys, budget=6, policy="last_key", chunk=2, sinks=2, recent=1)
    assert index.tolist() == [[[0, 1, 4, 5, 8]]]


def test_random_depends_on_the_seed_alone_and_leaves_the_global_generator_untouched():
    keys = random_keys(200)
    state = torch.random.get_rng_state()
    first, again, other = (kept(keys, budget=64, policy="random", seed=s) for s in (3, 3, 4))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert torch.equal(torch.random.get_rng_state(), state)


def test_ties_go_to_the_lower_index():
    index = kept(torch.zeros(1, 1, 12, 2), budget=8, policy="last_key", chunk=2, sinks=2, recent=2)
    assert index.tolist() == [[[0, 1, 2, 3, 4, 5, 10, 11]]]


def test_chunk_scores_sum_or_average_a_partial_last_chunk_over_its_own_keys():
    scores = torch.tensor([[[1.0, 2, 3, 4, 5]]])
    assert chunk_scores(scores, 2, mean=False).tolist() == [[[3.0, 7.0, 5.0]]]
    assert chunk_scores(scores, 2, mean=True).tolist() == [[[1.5, 3.5, 5.0]]]


# --- the bound


@pytest.mark.parametrize("policy", BLIND)
@pytest.mark.parametrize(("length", "budget"), [(5, 256), (50, 64), (64, 64)])
def test_a_prompt_within_the_budget_is_kept_whole(policy, length, budget):
    index = kept(random_keys(length), budget=budget, policy=policy, chunk=16, sinks=4, recent=8)
    assert index.tolist() == [[list(range(length))] * 2]


@pytest.mark.parametrize("policy", KEEPING)
def test_one_key_over_the_budget_drops_something_but_never_the_final_partial_chunk(policy):
    """B50."""
    index = kept(random_keys(65), budget=64, policy=policy, chunk=16, sinks=4, recent=8)
    assert index.shape[2] == 49  # three whole chunks and the partial one
    assert (index[..., -1] == 64).all()
    assert (index[..., :4] == torch.arange(4)).all()


@pytest.mark.parametrize("policy", KEEPING)
def test_sinks_and_the_two_token_last_chunk_stay_when_130_tokens_meet_a_budget_of_96(policy):
    """B51."""
    index = kept(random_keys(130), budget=96, policy=policy, chunk=16, sinks=4, recent=8)
    assert index.shape[2] <= 96
    assert (index[..., :4] == torch.arange(4)).all()
    assert (index[..., -2:] == torch.tensor([128, 129])).all()


@settings(max_examples=150, deadline=None)
@given(
    T=st.integers(1, 300),
    budget=st.integers(4, 16).map(lambda n: 8 * n),
    policy=st.sampled_from(KEEPING),
    sinks=st.integers(0, 8),
    recent=st.integers(0, 8),
    seed=st.integers(0, 3),
)
def test_whatever_the_length_the_budget_holds_and_is_used(T, budget, policy, sinks, recent, seed):
    index = kept(
        random_keys(T, seed=seed), budget=budget, policy=policy, chunk=8, sinks=sinks, recent=recent, seed=seed
    )
    assert index.shape[:2] == (1, 2)
    size = index.shape[2]
    assert min(T, budget - 7) <= size <= min(T, budget)
    assert size == T or budget < T
    assert (index.diff(dim=-1) > 0).all(), "ascending, none twice"
    assert (index >= 0).all()
    assert (index < T).all()
    for head in index[0].tolist():
        assert set(range(min(sinks, T))) <= set(head)
        assert set(range(max(0, T - max(recent, 1)), T)) <= set(head)


def test_forced_chunks_beyond_the_budget_are_refused_with_numbers():
    with pytest.raises(ValueError, match=r"budget = 16 holds 2 chunks of 8, sinks and recent keys need 3"):
        kept(random_keys(60), budget=16, policy="sink_recent", chunk=8, sinks=8, recent=8)


# --- window mass


def test_window_mass_equals_the_probabilities_of_eager_attention():
    """B21."""
    ids = torch.randint(3, 128, (1, 50), generator=torch.Generator().manual_seed(1))
    cache = KVStorage(2, 50, num_queries=8)
    with torch.inference_mode():
        tiny_llama()(ids, cache=cache, use_cache=True, observer=cache)
    eager = tiny_llama()
    eager.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = eager(ids, use_cache=False, output_attentions=True).attentions
    for layer, weights in zip(cache.layers, attentions, strict=True):
        expected = weights[:, :, -8:].reshape(1, 2, 2, 8, 50).mean((2, 3))
        mass = window_mass(Evidence(layer.queries, layer.view()[0], 16**-0.5))
        torch.testing.assert_close(mass, expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(mass.sum(-1), torch.ones(1, 2), atol=1e-5, rtol=0)


class _Largest(TorchDispatchMode):
    """Remembers the largest tensor any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor):
            self.numel = max(self.numel, out.numel())
        return out


@pytest.mark.parametrize("window", [1, 8])
def test_window_mass_never_forms_more_than_heads_x_window_x_length_weights(window):
    """B21: with L = 4096 and the last query alone the weights are (1, heads, 1, 4096)."""
    queries, keys = torch.randn(1, 4, window, 2), torch.randn(1, 2, 4096, 2)
    with _Largest() as largest:
        window_mass(Evidence(queries, keys, 1.0))
    assert largest.numel <= 4 * window * 4096


def test_window_mass_of_half_precision_keys_is_computed_in_fp32():
    mass = window_mass(Evidence(torch.randn(1, 4, 2, 8).bfloat16(), torch.randn(1, 2, 30, 8).bfloat16(), 1.0))
    assert mass.dtype == torch.float32


# --- budgets


def test_a_budget_that_is_no_multiple_of_the_chunk_names_the_nearest_legal_ones():
    """B51."""
    with pytest.raises(ValueError, match=r"budget = 100 is not a multiple of chunk = 16; nearest legal: 96 or 112"):
        check_budget(100, chunk=16, sinks=4, recent=8)


@pytest.mark.parametrize("budget", [0, -2, 7, 16, 24])
def test_a_budget_too_small_for_sinks_recent_and_one_chunk_names_the_smallest_legal_one(budget):
    with pytest.raises(ValueError, match=r"the smallest legal budget is 32"):
        check_budget(budget, chunk=8, sinks=8, recent=8)


@pytest.mark.parametrize("budget", [FULL, 32, 40, 4096])
def test_legal_budgets_pass(budget):
    check_budget(budget, chunk=8, sinks=8, recent=8)


@given(chunk=st.integers(1, 32), sinks=st.integers(0, 64), recent=st.integers(0, 64), T=st.integers(1, 600))
@settings(max_examples=100, deadline=None)
def test_the_smallest_legal_budget_can_always_be_filled(chunk, sinks, recent, T):
    budget = (forced_chunks(chunk=chunk, sinks=sinks, recent=recent) + 1) * chunk
    check_budget(budget, chunk=chunk, sinks=sinks, recent=recent)
    piece = prefill_piece(budget, chunk=chunk, sinks=sinks, recent=recent, most=512)
    assert piece % chunk == 0
    rule = {"chunk": chunk, "sinks": sinks, "recent": recent}
    for room in (budget, budget - piece):
        assert kept(torch.zeros(1, 1, T, 1), budget=room, policy="sink_recent", **rule).shape[2] <= room


@pytest.mark.parametrize(("given_value", "parsed"), [("full", -1), (-1, -1), ("256", 256), (64, 64)])
def test_budgets_are_numbers_or_full(given_value, parsed):
    assert parse_budget(given_value) == parsed


@pytest.mark.parametrize("value", [True, 1.5, "half", None, [32], [64, 32]])
def test_other_budgets_are_refused(value):
    """R07: budgets per layer among them."""
    with pytest.raises(ValueError, match="a number of tokens or 'full'"):
        parse_budget(value)


def test_controls_leave_out_what_attention_mass_keeps_by_rule():
    rule = {"chunk": 8, "sinks": 8, "recent": 8, "window": 8}
    keys = random_keys(200)
    no_sinks, no_recent = (kept(keys, keys[:, :, -8:], budget=64, policy=p, **rule) for p in ("no_sinks", "no_recent"))
    assert no_sinks.shape[2] == no_recent.shape[2] == 64
    assert int(no_sinks.min()) >= 8 and set(range(192, 200)) <= set(no_sinks[0, 0].tolist())
    held = set(no_recent.flatten().tolist())
    assert held >= {*range(8), *range(192, 200)} and not held & set(range(184, 192))


@pytest.mark.parametrize("policy", ["no_sinks", "no_recent"])
def test_a_control_fills_the_budget_though_nothing_else_is_left(policy):
    keys = random_keys(72)
    index = kept(keys, keys[:, :, -8:], budget=64, policy=policy, chunk=8, sinks=8, recent=8, window=8)
    assert index.shape[2] == 64
