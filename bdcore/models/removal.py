"""Which layers a model can spare: one after another, the layer without which the rest stays closest to the whole.

The orders are nested: what is left at ten layers is part of what is left at sixteen. A slice that starts close to its
verifier has less to learn than one of layers chosen by what each of them does alone (`bdcore.models.heads`).

Legend: B texts, T tokens, J judged tokens of each, V vocabulary, E hidden width.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Removal:
    layer: int
    divergence: float
    """KL(whole || rest) in nats, mean over the judged tokens, once this layer is out too."""


class _Gone(nn.Module):
    """In a layer's place: hands on what comes in, or `states_BTE` where the layers before are known."""

    def __init__(self, states_BTE: Tensor | None = None) -> None:
        super().__init__()
        self.states_BTE = states_BTE

    def forward(self, hidden_BTE: Tensor, *_: Any, **__: Any) -> Tensor:
        return hidden_BTE if self.states_BTE is None else self.states_BTE


def removals(model: Any, ids_BT: Tensor, done: Sequence[int] = ()) -> Iterator[Removal]:
    """Every removal after those of `done` until one layer is left, each when it is found.

    Judged on the second half of each text, whose tokens have something to look back on. Each step runs the rest once
    for every layer of it, from that layer on. The model is whole whenever the caller has it.
    """
    kept = [layer for layer in range(len(model.model.layers)) if layer not in done]
    whole_BJV, _ = _run(model, list(model.model.layers), ids_BT)
    while len(kept) > 1:
        best = min(_candidates(model, ids_BT, kept, whole_BJV), key=lambda found: (found.divergence, found.layer))
        kept.remove(best.layer)
        yield best


def _candidates(model: Any, ids_BT: Tensor, kept: list[int], whole_BJV: Tensor) -> Iterator[Removal]:
    layers = [layer if i in kept else _Gone() for i, layer in enumerate(model.model.layers)]
    _, states = _run(model, layers, ids_BT)
    for i in kept:
        rest = [_Gone(states[i]), *(_Gone() for _ in range(i)), *layers[i + 1 :]]
        yield Removal(i, _divergence(whole_BJV, _run(model, rest, ids_BT)[0]))


@torch.inference_mode()
def _run(model: Any, layers: Sequence[nn.Module], ids_BT: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities (B, J, V) with these layers, and what came into each of them (B, T, E)."""
    states: list[Tensor] = []
    hooks = [layer.register_forward_pre_hook(lambda _, args: states.append(args[0])) for layer in layers]
    before, model.model.layers = model.model.layers, nn.ModuleList(layers)
    try:
        logits = model(ids_BT, use_cache=False, logits_to_keep=ids_BT.shape[1] // 2).logits
    finally:
        model.model.layers = before
        for hook in hooks:
            hook.remove()
    return logits.float().log_softmax(-1), states


def _divergence(whole_BJV: Tensor, rest_BJV: Tensor) -> float:
    return float(F.kl_div(rest_BJV, whole_BJV, reduction="sum", log_target=True)) / whole_BJV[..., 0].numel()
