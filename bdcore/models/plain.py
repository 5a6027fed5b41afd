"""A model as transformers runs it by itself: its own attention, products and vocabulary, over the weights we hold.

Legend: V ids of a vocabulary, D width of the model.
"""

import copy
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from bdcore.models.drafter import Drafter, full_head
from bdcore.models.layers import layer_facts
from bdcore.models.linear import BlockLinear


def plain_model(model: Any) -> Any:
    """A twin of one of our models that shares its weights, with the library's attention and linear layers.

    The kernel is SDPA; eager where logits are capped, which the library's SDPA leaves out (Gemma 2).
    """
    shared = {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())}
    twin = copy.deepcopy(model, shared)
    modules: list[Any] = [module for module in twin.modules() if type(module) is BlockLinear]
    for module in modules:
        module.__class__ = nn.Linear
    capped = any(facts.softcap is not None for facts in layer_facts(model))
    twin.set_attn_implementation("eager" if capped else "sdpa")
    return twin


def plain_drafter(drafter: Drafter, vocab: int) -> Any:
    """A drafter as its exported folder is loaded: the head whole again, embedding and head of `vocab` rows, so that it
    may be the `assistant_model` of a verifier of that vocabulary.
    """
    twin = plain_model(drafter.model)
    if drafter.ids is not None:
        twin.lm_head = full_head(twin.lm_head, drafter.ids, twin.config.vocab_size)
    fit_vocabulary(twin, vocab)
    return twin


def fit_vocabulary(model: Any, vocab: int) -> None:
    """Give embedding and head exactly `vocab` rows, in place; transformers wants equal counts of both models.

    Rows past `vocab` are no tokens and go. A new row is the mean of the others, so the head never prefers it.
    """
    if model.config.vocab_size == vocab:
        return
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = embedding.weight is head.weight
    embedding.weight = nn.Parameter(_rows(embedding.weight.detach(), vocab))
    head.weight = embedding.weight if tied else nn.Parameter(_rows(head.weight.detach(), vocab))
    embedding.num_embeddings = head.out_features = model.config.vocab_size = vocab


def _rows(weight_VD: Tensor, vocab: int) -> Tensor:
    missing = vocab - weight_VD.shape[0]
    if missing <= 0:
        return weight_VD[:vocab].clone()
    return torch.cat([weight_VD, weight_VD.mean(0, keepdim=True).expand(missing, -1)])
