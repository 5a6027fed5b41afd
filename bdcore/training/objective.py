"""L = L_A + lam * L_C from one prefix: L_A sees the prefix in full, L_C a sparse view of it (arXiv 2606.00144).

Legend: B batch, T = P + C tokens, P prefix, C continuation.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bdcore.config import TrainingConfig
from bdcore.kv.attention import soft_capped
from bdcore.models.drafter import Drafter
from bdcore.training.batches import Batch
from bdcore.training.losses import LossSum, head_loss
from bdcore.training.views import detached, extend, sparse


@dataclass(frozen=True)
class StepLoss:
    """Both branches of one step; `sparse` is None where lam = 0."""

    loss: Tensor
    full: LossSum
    sparse: LossSum | None
    budget: int | None
    cached: int
    """Keys per layer and head of the sparse view."""


def _head(model: Any) -> Callable[[Tensor], Tensor]:
    """Hidden states to logits as the model computes them, its final cap included (Gemma 2)."""
    cap = getattr(model.config, "final_logit_softcapping", None)
    return lambda hidden: soft_capped(model.lm_head(hidden), cap)


def joint_loss(
    drafter: Drafter, batch: Batch, config: TrainingConfig, *, prefix: int, budget: int | None, seed: int
) -> StepLoss:
    """The loss of one batch. With `budget` None only L_A is computed. The prefix is read once and not changed."""
    model, head = drafter.model, _head(drafter.model)
    everywhere = config.supervise == "all"
    with contextlib.nullcontext() if everywhere else torch.no_grad():
        hidden_prefix, view = extend(model, batch.ids_BT[:, :prefix], window=config.views.window)
    tail = batch.ids_BT[:, prefix:]
    hidden_tail, _ = extend(model, tail, view=view, window=config.views.window)
    hidden, targets = hidden_tail, batch.targets[prefix:]
    if everywhere:
        hidden, targets = torch.cat([hidden_prefix, hidden_tail], 1), batch.targets
    full = head_loss(head, hidden, targets, kl_weight=config.kl_weight)
    if budget is None:
        return StepLoss(full.mean(), full, None, None, 0)
    seen = sparse(
        detached(view) if config.detach_prefix else view,
        budget=budget,
        selection=config.views.selection(seed),
        position_mode=config.views.position_mode,
        model=model,
    )
    hidden_sparse, _ = extend(model, tail, view=seen, window=config.views.window)
    part = head_loss(head, hidden_sparse, batch.targets[prefix:], kl_weight=config.kl_weight)
    return StepLoss(full.mean() + config.lam * part.mean(), full, part, budget, seen.cached)
