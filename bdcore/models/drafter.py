"""Drafters: slicing one from the verifier, pruning its head, and the folder it is kept in.

The folder is a plain Hugging Face checkpoint that `AutoModelForCausalLM` loads, plus `drafter.json` with the ids of a
pruned head. Our loader cuts the head down to them; the plain checkpoint keeps the full vocabulary.
"""

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from bdcore.identity import write_json
from bdcore.kv.attention import NAME as ATTENTION
from bdcore.models.linear import adapt
from bdcore.models.loading import load_model

DRAFTER_FILE = "drafter.json"


@dataclass
class Drafter:
    """A model that proposes. `ids[j]` is the verifier's id of output j; None when they are the same."""

    model: Any
    ids: Tensor | None

    def to_ids(self, outputs: Tensor) -> Tensor:
        """Outputs of the (pruned) head as ids of the verifier's vocabulary."""
        return outputs if self.ids is None else self.ids[outputs]

    def spread(self, logits_TV: Tensor, vocab: int) -> Tensor:
        """Logits over the verifier's vocabulary: (T, vocab), -inf for ids the (pruned) head does not have."""
        outputs = logits_TV.shape[1]
        if self.ids is None and outputs == vocab:
            return logits_TV
        full_TV = logits_TV.new_full((logits_TV.shape[0], vocab), float("-inf"))
        if self.ids is None:
            full_TV[:, :outputs] = logits_TV
        else:
            full_TV[:, self.ids] = logits_TV
        return full_TV


def most_frequent(counts_V: Tensor, keep: int) -> Tensor:
    """The `keep` most frequent ids, ascending; ties go to the lower id."""
    return counts_V.argsort(descending=True, stable=True)[:keep].sort().values


def slice_verifier(
    verifier: Any,
    layers: list[int],
    *,
    ids: Tensor | None,
    rope_theta: float | None,
    max_positions: int | None,
) -> Drafter:
    """A drafter of some of the verifier's layers, with its embedding and (pruned) head, in fp32."""
    total = verifier.config.num_hidden_layers
    if not all(0 <= layer < total for layer in layers):
        raise ValueError(f"drafter.layers = {layers}: the verifier has layers 0..{total - 1}")
    config = copy.deepcopy(verifier.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [config.layer_types[layer] for layer in layers]
    if rope_theta is not None:
        config.rope_parameters = _with_base(config.rope_parameters, float(rope_theta))
    if max_positions is not None:
        config.max_position_embeddings = max_positions
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION, dtype=torch.float32)
    model.model.embed_tokens.load_state_dict(verifier.model.embed_tokens.state_dict())
    model.model.norm.load_state_dict(verifier.model.norm.state_dict())
    for mine, theirs in zip(model.model.layers, layers, strict=True):
        mine.load_state_dict(verifier.model.layers[theirs].state_dict())
    model.lm_head.load_state_dict(verifier.lm_head.state_dict())
    _prune_head(model, ids)
    return Drafter(model.to(verifier.device).eval(), None if ids is None else ids.to(verifier.device))


def _with_base(rope_parameters: dict[str, Any], theta: float) -> dict[str, Any]:
    # Gemma 3 has RoPE parameters for each kind of layer.
    if any(isinstance(value, dict) for value in rope_parameters.values()):
        return {kind: _with_base(value, theta) for kind, value in rope_parameters.items()}
    return {**rope_parameters, "rope_theta": theta}


def prune(drafter: Drafter, counts_V: Tensor, keep: int) -> Drafter:
    """The drafter with the `keep` most frequent ids of its head alone; its model is changed. `counts_V`: how often each
    id of the verifier occurs. Untouched where the head has no more ids than that.
    """
    head = drafter.model.lm_head
    ids = torch.arange(head.out_features) if drafter.ids is None else drafter.ids.cpu()
    if keep >= len(ids):
        return drafter
    rows = most_frequent(counts_V[ids], keep)
    _prune_head(drafter.model, rows.to(head.weight.device))
    return Drafter(drafter.model, ids[rows].to(head.weight.device))


def _prune_head(model: Any, ids: Tensor | None) -> None:
    if ids is not None:
        model.config.tie_word_embeddings = False
        head = nn.Linear(model.lm_head.in_features, len(ids), bias=False)
        head.weight = nn.Parameter(model.lm_head.weight.detach()[ids].clone())
        model.lm_head = adapt(head.to(model.device))


def save_drafter(drafter: Drafter, folder: Path, *, tokenizer: Any | None, facts: dict[str, Any]) -> None:
    """Write the folder. `facts` (layers, stage, views, ...) go to `drafter.json` beside the head's ids."""
    pruned = drafter.model.lm_head
    try:
        if drafter.ids is not None:
            drafter.model.lm_head = full_head(pruned, drafter.ids, drafter.model.config.vocab_size)
        drafter.model.save_pretrained(folder)
    finally:
        drafter.model.lm_head = pruned
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    ids = None if drafter.ids is None else drafter.ids.tolist()
    write_json(folder / DRAFTER_FILE, {**facts, "head_ids": ids})


def full_head(pruned: nn.Linear, ids: Tensor, vocab_size: int) -> nn.Linear:
    """A head of `vocab_size` outputs that prefers the same ids as the pruned one, whose outputs are `ids`."""
    # Every dropped id gets the mean of the kept rows: its logit is the mean of theirs, always below the best one. Zero
    # rows would win wherever all kept logits are negative; a kept id's own row wins ties for dropped ids before it.
    where = {"device": pruned.weight.device, "dtype": pruned.weight.dtype}
    full = nn.Linear(pruned.in_features, vocab_size, bias=False, **where)
    guard = pruned.weight.detach().mean(0, keepdim=True)
    full.weight.data.copy_(guard.expand(vocab_size, -1))
    full.weight.data[ids] = pruned.weight.detach()
    return full


def load_drafter(
    source: str, *, verifier_vocab: int, dtype: torch.dtype, device: str, revision: str | None = None
) -> Drafter:
    """A drafter from one of our folders, or any causal LM from a folder or the hub."""
    model = load_model(source, dtype=dtype, device=device, revision=revision)
    facts = read_facts(source)
    ids = facts.get("head_ids")
    if ids is None and model.config.vocab_size > verifier_vocab:
        ids = list(range(verifier_vocab))  # padding rows of the head are no tokens
    tensor = None if ids is None else torch.tensor(ids, device=device)
    _prune_head(model, tensor)
    return Drafter(model, tensor)


def read_facts(source: str) -> dict[str, Any]:
    """What `drafter.json` says; empty for models that are not ours."""
    path = Path(source) / DRAFTER_FILE
    return json.loads(path.read_text()) if path.is_file() else {}
