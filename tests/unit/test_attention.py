"""Grouped attention over a longer cache, and the models that read through it."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from bdcore.kv import attention
from bdcore.kv.attention import NAME, causal_block_mask, grouped_attention
from bdcore.models.stepper import CachePlan, Stepper
from tests.conftest import tiny_llama


def plain_attention(query, key, value, scale):
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    T, S = query.shape[2], key.shape[2]
    hidden = torch.arange(S)[None] > torch.arange(S - T, S)[:, None]
    return (query @ key.transpose(2, 3) * scale).masked_fill(hidden, float("-inf")).softmax(-1) @ value


@pytest.mark.parametrize(("T", "S"), [(1, 1), (1, 9), (5, 5), (5, 42), (2, 3)])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_block_sees_everything_before_it_and_itself_causally(T, S, kv_heads):
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, h, n, 16) for h, n in ((4, T), (kv_heads, S), (kv_heads, S)))
    out = grouped_attention(query, key, value, 0.25)
    torch.testing.assert_close(out, plain_attention(query, key, value, 0.25), atol=1e-5, rtol=0)


def test_the_mask_is_aligned_to_the_newest_keys():
    assert causal_block_mask(2, 4, torch.device("cpu")).tolist() == [[True, True, True, False], [True] * 4]


def eager_logits(model, ids, other="eager"):
    """Cache-free forward of the library's own attention."""
    implementation = model.config._attn_implementation
    model.set_attn_implementation(other)
    try:
        with torch.inference_mode():
            return model(torch.tensor([ids]), use_cache=False).logits[0]
    finally:
        model.set_attn_implementation(implementation)


@pytest.mark.parametrize("other", ["eager", "sdpa"])
def test_a_block_of_5_over_a_past_of_37_equals_a_cache_free_forward(other, prompt):
    """B09."""
    model, ids = tiny_llama(), prompt(42)
    stepper = Stepper(model, CachePlan(capacity=64, block=5))
    first = stepper.prefill(ids[:37])
    block = stepper.feed(ids[37:])[0]
    expected = eager_logits(model, ids, other)
    torch.testing.assert_close(first[0], expected[36], atol=1e-5, rtol=0)
    torch.testing.assert_close(block, expected[37:], atol=1e-5, rtol=0)


def test_a_changed_last_token_of_a_block_leaves_the_rows_before_it_as_they_were(prompt):
    """B09."""
    ids = prompt(42)
    stepper = Stepper(tiny_llama(), CachePlan(capacity=64, block=5))
    stepper.prefill(ids[:37])
    before = stepper.feed(ids[37:])[0]
    stepper.rollback(5)
    after = stepper.feed([*ids[37:41], (ids[41] + 1) % 128])[0]
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4], after[4])


FAMILY_CONFIGS = {
    "llama": LlamaConfig,
    "mistral": lambda **kw: MistralConfig(**kw, sliding_window=None),
    "qwen2": Qwen2Config,
    "qwen3": Qwen3Config,
}


@pytest.mark.parametrize("family", sorted(FAMILY_CONFIGS))
@pytest.mark.parametrize("head_dim", [16, 32])
def test_every_supported_family_reads_our_cache_as_its_own_eager_attention_does(family, head_dim, prompt):
    if family == "qwen2" and head_dim == 32:
        pytest.skip("qwen2 has no head size of its own")
    sizes = {"head_dim": head_dim} if family != "qwen2" else {}
    config = FAMILY_CONFIGS[family](
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2, **sizes,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32).eval()
    ids = prompt(42)
    stepper = Stepper(model, CachePlan(capacity=64, block=5, prefill_chunk=16))
    stepper.prefill(ids[:36])
    stepper.feed(ids[36:37])
    block = stepper.feed(ids[37:])[0]
    assert stepper.cache.layers[0].view()[0].shape == (1, 2, 42, head_dim)
    torch.testing.assert_close(block, eager_logits(model, ids)[37:], atol=1e-4, rtol=0)


def test_a_mask_is_refused_rather_than_ignored(prompt):
    ids = torch.tensor([prompt(4)])
    with pytest.raises(ValueError, match="takes no mask"):
        tiny_llama()(ids, attention_mask=torch.zeros(1, 1, 4, 4))


@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("S", [40, 41, 77])
@pytest.mark.parametrize("T", [1, 2, 5])
def test_keys_read_in_two_halves_give_what_they_give_in_one(monkeypatch, T, S, dtype, near):
    """Three KV heads on two threads: the halves are joined by their log-sum-exp; an odd key counts once."""
    generator = torch.Generator().manual_seed(S)
    query = torch.randn(1, 6, T, 16, generator=generator).to(dtype)
    keys, values = (torch.randn(1, 3, 90, 16, generator=generator).to(dtype)[:, :, :S] for _ in range(2))
    whole = grouped_attention(query, keys, values, 0.25)
    monkeypatch.setattr(attention, "SPLIT_FROM", 1)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    parts = []
    split = attention._split_attention
    monkeypatch.setattr(attention, "_split_attention", lambda *a: parts.append(1) or split(*a))
    with torch.inference_mode():
        torch.testing.assert_close(grouped_attention(query, keys, values, 0.25), whole, atol=near, rtol=0)
    assert parts, "the keys were read in two halves"
