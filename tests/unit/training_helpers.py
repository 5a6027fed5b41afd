"""Small training sets of the tiny Llama, and its losses in plain PyTorch, without a cache object."""

import copy
import random

import numpy as np
import torch
import torch.nn.functional as F

from bdcore.config import TrainingConfig
from bdcore.kv.selection import Evidence, select
from bdcore.models.drafter import Drafter
from bdcore.training.batches import Tokens, collate
from tests.conftest import tiny_llama
from tests.unit.reference import rotate, run, weigh

VOCAB, TOP_K = 128, 3


def fresh_drafter(seed=0, **changes) -> Drafter:
    return Drafter(tiny_llama(seed=seed, **changes), None)


def forced_row(doc: int, length: int = 48) -> dict:
    rng = random.Random(doc)
    ids, labels = ([rng.randrange(3, VOCAB) for _ in range(length)] for _ in range(2))
    topk = [[label, *rng.sample(range(3, VOCAB), TOP_K - 1)] for label in labels]
    probs = [[-0.5, -1.5, -3.0]] * length
    return {
        "doc_id": f"doc-{doc}",
        "mode": "forced",
        "prompt_ids": ids,
        "target_ids": labels,
        "topk_ids": topk,
        "topk_logprobs": probs,
        "finish_reason": "length",
    }


def generated_row(doc: int, prompt: list[int], target: list[int], reason: str) -> dict:
    k = [[t, t + 1, t + 2] for t in target]
    return {
        "doc_id": f"doc-{doc}",
        "mode": "generated",
        "prompt_ids": prompt,
        "target_ids": target,
        "topk_ids": k,
        "topk_logprobs": [[-0.5, -1.5, -3.0]] * len(target),
        "finish_reason": reason,
    }


def rows(count: int = 6, length: int = 48) -> list[dict]:
    return [forced_row(doc, length) for doc in range(count)]


def stage(**changes) -> TrainingConfig:
    """A stage of seconds: prefix 32, continuation 8, budgets 16 and 24 of chunks of 4."""
    views = {"chunk": 4, "sinks": 2, "recent": 2, "window": 2, "budgets": {16: 0.5, 24: 0.5}}
    views |= changes.pop("views", {})
    steps = changes.pop("steps", 10)
    settings = {
        "steps": steps,
        "prefix_lengths": {24: 0.5, 32: 0.5},
        "continuation": 8,
        "learning_rate": 1e-3,
        "warmup": min(2, steps - 1),
        "validation": {"sequences": 1, "every": 5},
        "checkpoint_every": 5,
        "views": views,
        **changes,
    }
    return TrainingConfig.model_validate(settings)


def batch_of(*sequences, labels=None):
    """Windows of random tokens (or the given ids) of one length as a batch."""
    labels = labels or [None] * len(sequences)
    return collate([window(ids, given) for ids, given in zip(sequences, labels, strict=True)], None, "cpu")


def window(ids, labels=None) -> Tokens:
    labels = labels if labels is not None else [(7 * i + 5) % VOCAB for i in ids]
    topk = [[label, (label + 1) % VOCAB, (label + 2) % VOCAB] if label >= 0 else [-100] * 3 for label in labels]
    logprobs = np.full((len(ids), 3), [-0.5, -1.5, -3.0], np.float32)
    return Tokens(np.array(ids, np.int32), np.array(labels, np.int32), np.array(topk, np.int32), logprobs)


def token_ids(length, seed=0):
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def reference_logits(model, ids, *, prefix, config, budget=None, detach=False, seed=0, kept_out=None):
    """Logits of the tokens after `prefix`, and of the prefix: full attention, but the tail sees the kept keys alone.

    One forward over all tokens with an explicit mask per KV head; no cache object anywhere. `kept_out` collects the
    kept indices of each layer.
    """
    inv_freq = model.model.rotary_emb.inv_freq
    in_cache = "in_cache" in config.views.position_mode
    (policy,) = config.views.policy
    selection, window_size = config.views.selection(policy, seed), config.views.window

    def attend(layer, q, k, v):
        T, heads, group = q.shape[1], k.shape[0], q.shape[0] // k.shape[0]
        at = torch.arange(T)
        causal = torch.ones(T, T, dtype=torch.bool).tril()
        turned_q, turned_k = rotate(q, at, inv_freq), rotate(k, at, inv_freq)
        pk, pv = turned_k[:, :prefix], v[:, :prefix]
        kept = torch.arange(prefix).expand(heads, prefix)
        if budget is not None:
            newest = turned_q[:, max(0, prefix - window_size) : prefix]
            with torch.no_grad():
                rule = selection.for_layer(layer)
                kept = select(Evidence(newest[None], pk[None], q.shape[2] ** -0.5), budget=budget, selection=rule)[0]
        if kept_out is not None:
            kept_out.append(kept)
        K, tail = kept.shape[1], T - prefix
        out = []
        for j in range(q.shape[0]):
            h = j // group
            head_out = weigh(turned_q[j, :prefix], pk[h], pv[h], causal[:prefix, :prefix])
            old_k, old_v = (k[h, :prefix], pv[h]) if in_cache else (pk[h], pv[h])
            if detach:
                old_k, old_v = old_k.detach(), old_v.detach()
            if in_cache:
                keys = torch.cat([old_k[kept[h]], k[h, prefix:]])
                keys = rotate(keys, torch.arange(K + tail), inv_freq)
                query = rotate(q[j, prefix:], torch.arange(K, K + tail), inv_freq)
            else:
                keys, query = torch.cat([old_k[kept[h]], turned_k[h, prefix:]]), turned_q[j, prefix:]
            values = torch.cat([old_v[kept[h]], v[h, prefix:]])
            visible = torch.ones(tail, K + tail, dtype=torch.bool).tril(K)
            out.append(torch.cat([head_out, weigh(query, keys, values, visible)]))
        return torch.stack(out)

    return run(model, ids, attend)


def cross_entropy(logits, labels):
    return F.cross_entropy(logits.float(), torch.tensor(labels), ignore_index=-100)


def double_drafter() -> Drafter:
    return Drafter(copy.deepcopy(tiny_llama()).double(), None)
