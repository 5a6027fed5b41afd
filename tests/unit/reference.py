"""The tiny Llama in plain PyTorch, without a cache object: what the product's numbers are compared with.

Legend: Q query heads, H KV heads, T tokens, D head dim.
"""

import torch


def rotate(x_HTD, positions, inv_freq):
    """Rotary embedding at the given positions, (T,) or (H, T)."""
    angle = positions[..., None].float() * inv_freq
    angle = torch.cat([angle, angle], -1)
    first, second = x_HTD.chunk(2, -1)
    return x_HTD * angle.cos() + torch.cat([-second, first], -1) * angle.sin()


def run(model, ids, attend):
    """Logits (T, V); `attend(layer, q_QTD, k_HTD, v_HTD)` gets unrotated queries and keys and returns (Q, T, D)."""
    T, heads = len(ids), model.config.num_attention_heads
    x = model.model.embed_tokens(torch.tensor(ids))
    for i, layer in enumerate(model.model.layers):
        h = layer.input_layernorm(x)
        q, k, v = (
            getattr(layer.self_attn, name)(h).view(T, -1, layer.self_attn.head_dim).transpose(0, 1)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        assert q.shape[0] == heads
        x = x + layer.self_attn.o_proj(attend(i, q, k, v).transpose(0, 1).reshape(T, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return model.lm_head(model.model.norm(x))


def weigh(q_TD, k_SD, v_SD, visible_TS):
    """One head, explicit mask."""
    logits = (q_TD @ k_SD.T / q_TD.shape[1] ** 0.5).masked_fill(~visible_TS, float("-inf"))
    return logits.softmax(-1) @ v_SD


@torch.no_grad()
def masked_logits(model, ids, visible):
    """Full keys and values at their own positions; `visible[layer]` is an (H, T, T) boolean mask."""
    inv_freq, positions = model.model.rotary_emb.inv_freq, torch.arange(len(ids))

    def attend(layer, q, k, v):
        group = q.shape[0] // k.shape[0]
        q, k = rotate(q, positions, inv_freq), rotate(k, positions, inv_freq)
        return torch.stack(
            [weigh(q[j], k[j // group], v[j // group], visible[layer][j // group]) for j in range(len(q))]
        )

    return run(model, ids, attend)


def causal(model, length):
    """The mask of the full cache, for every layer."""
    heads = model.config.num_key_value_heads
    mask = torch.ones(length, length, dtype=torch.bool).tril().expand(heads, length, length)
    return [mask.clone() for _ in model.model.layers]


class InCacheReference:
    """Keeps keys unrotated and rotates those in reach to 0, 1, 2, ... whenever a block reads them."""

    def __init__(self, model):
        self.model, self.store = model, {}

    @torch.no_grad()
    def feed(self, ids, kept):
        """`kept[layer]`: (H, K) token indices that are still cached before this block."""
        inv_freq = self.model.model.rotary_emb.inv_freq

        def attend(layer, q, k, v):
            past = self.store.get(layer, (k[:, :0], v[:, :0]))
            keys, values = (torch.cat(pair, 1) for pair in zip(past, (k, v), strict=True))
            self.store[layer] = keys, values
            T, group = q.shape[1], q.shape[0] // k.shape[0]
            K, seen = kept[layer].shape[1], past[0].shape[1]
            visible = torch.ones(T, K + T, dtype=torch.bool).tril(K)
            out = []
            for j in range(len(q)):
                reach = torch.cat([kept[layer][j // group], torch.arange(seen, seen + T)])
                moved = rotate(keys[j // group][reach], torch.arange(K + T), inv_freq)
                query = rotate(q[j], torch.arange(K, K + T), inv_freq)
                out.append(weigh(query, moved, values[j // group][reach], visible))
            return torch.stack(out)

        return run(self.model, ids, attend)


class Survivors:
    """Which tokens each layer and KV head still caches, followed from outside through the `keep` calls."""

    def __init__(self, stepper):
        heads = stepper.model.config.num_key_value_heads
        self.alive = [torch.zeros(heads, 0, dtype=torch.long) for _ in stepper.cache.layers]
        for i, layer in enumerate(stepper.cache.layers):
            layer.keep = self._watched(i, layer.keep)

    def _watched(self, i, keep):
        def watched(index, inv_freq):
            self.alive[i] = self.alive[i].gather(1, index[0])
            keep(index, inv_freq)

        return watched

    def fed(self, first, count):
        new = torch.arange(first, first + count)
        self.alive = [torch.cat([a, new.expand(len(a), -1)], 1) for a in self.alive]
