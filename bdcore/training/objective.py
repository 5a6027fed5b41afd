"""L = L_A + lam * L_C from one prefix: L_A sees it in full, L_C through sparse views (arXiv 2606.00144).

Legend: B batch, T tokens, N = blocks x B, C tokens of a block, E hidden size.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from bdcore.config import TrainingConfig
from bdcore.kv.attention import soft_capped
from bdcore.models.drafter import Drafter
from bdcore.runtime import seed_for
from bdcore.training.batches import Batch
from bdcore.training.losses import LossSum, Targets, head_loss
from bdcore.training.views import Block, Sight, View, detached, extend, sparse

Choice = TypeVar("Choice", int, str)


@dataclass(frozen=True)
class Draw:
    """What a step trains on: a function of (seed, step) alone."""

    prefix: int
    blocks: list[Block]
    """Blocks of `continuation` tokens with the view each has of what comes before it; none where lam = 0."""


def draw(config: TrainingConfig, seed: int, step: int) -> Draw:
    rng = random.Random(seed_for(seed, "view", step))
    prefix = _weighted(rng, config.prefix_lengths)
    if not config.lam:
        return Draw(prefix, [])
    return Draw(prefix, [Block(start, _sight(rng, config)) for start in starts(config, prefix)])


def starts(config: TrainingConfig, prefix: int) -> list[int]:
    """Where blocks begin: after the prefix, or in dense supervision after every `continuation` tokens."""
    first = prefix if config.supervise != "dense" else prefix % config.continuation or config.continuation
    every = range(first, prefix + 1, config.continuation)
    return [start for start in every for _ in range(config.views.per_step)]


def _sight(rng: random.Random, config: TrainingConfig) -> Sight:
    views = config.views
    return Sight(_weighted(rng, views.policy), _weighted(rng, views.budgets), _weighted(rng, views.position_mode))


def _weighted(rng: random.Random, weights: dict[Choice, float]) -> Choice:
    # Ascending: the order in which a configuration lists them is no part of its key.
    values = sorted(weights)
    return rng.choices(values, [weights[v] for v in values])[0]


@dataclass(frozen=True)
class StepLoss:
    """Sums of both branches. `views`: L_C by the name of its view."""

    full: LossSum
    views: dict[str, LossSum]

    @property
    def sparse(self) -> LossSum | None:
        return joined(list(self.views.values())) if self.views else None


def joined(parts: Sequence[LossSum]) -> LossSum:
    total = torch.stack([part.total for part in parts]).sum()
    return LossSum(total, sum(part.tokens for part in parts), sum(part.agreed for part in parts))


def losses(drafter: Drafter, batch: Batch, config: TrainingConfig, chosen: Draw, *, seed: int) -> StepLoss:
    """Both losses of a batch. The sequence is read once and not changed."""
    model, head = drafter.model, _head(drafter.model)
    hidden, view = _read(model, batch.ids_BT, chosen.prefix, everywhere=config.supervise != "continuation")
    first = batch.ids_BT.shape[1] - hidden.shape[1]
    full = head_loss(head, hidden, batch.targets[first:], config.loss_a)
    if not chosen.blocks:
        return StepLoss(full, {})
    seen = sparse(
        detached(view) if config.detach_prefix else view,
        chosen.blocks,
        rule=partial(config.views.selection, seed=seed),
        window=config.views.window,
        model=model,
    )
    part = partial(_cut, blocks=chosen.blocks, length=config.continuation)
    hidden_NCE, _ = extend(model, part(batch.ids_BT), view=seen)
    return StepLoss(full, _by_view(head, hidden_NCE, batch.targets.each(part), config, chosen.blocks))


def _head(model: Any) -> Callable[[Tensor], Tensor]:
    """Hidden states to logits as the model computes them, its final cap included (Gemma 2)."""
    cap = getattr(model.config, "final_logit_softcapping", None)
    return lambda hidden: soft_capped(model.lm_head(hidden), cap)


def _read(model: Any, ids_BT: Tensor, prefix: int, *, everywhere: bool) -> tuple[Tensor, View]:
    """(hidden states of the supervised tokens, view of all)."""
    if everywhere:
        return extend(model, ids_BT)
    with torch.no_grad():
        _, before = extend(model, ids_BT[:, :prefix])
    return extend(model, ids_BT[:, prefix:], view=before)


def _cut(x_BT: Tensor, blocks: Sequence[Block], length: int) -> Tensor:
    return torch.cat([x_BT[:, block.start : block.start + length] for block in blocks])


def _by_view(
    head: Callable[[Tensor], Tensor],
    hidden_NCE: Tensor,
    targets: Targets,
    config: TrainingConfig,
    blocks: Sequence[Block],
) -> dict[str, LossSum]:
    B = hidden_NCE.shape[0] // len(blocks)
    names = [block.sight.name for block in blocks for _ in range(B)]
    out: dict[str, LossSum] = {}
    for name in sorted(set(names)):
        of = torch.tensor([n for n, other in enumerate(names) if other == name], device=hidden_NCE.device)
        out[name] = head_loss(head, hidden_NCE[of], targets.each(lambda x, of=of: x[of]), config.loss_c)
    return out


def supervised(batch: Batch, config: TrainingConfig, chosen: Draw) -> tuple[int, int]:
    """(tokens of L_A, tokens of L_C), known before any forward: what means are taken over."""
    targets, first = batch.targets, chosen.prefix if config.supervise == "continuation" else 0
    tail = targets.each(partial(_cut, blocks=chosen.blocks, length=config.continuation)).tokens if chosen.blocks else 0
    return targets[first:].tokens, tail
