"""Losses per token against the verifier: pure functions of logits and targets. Means are taken over tokens, late.

Legend: N tokens, V drafter vocabulary, K top-k.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100


@dataclass(frozen=True)
class Targets:
    """Per token: the greedy id (IGNORE: not supervised) and the verifier's top-k. Ids of the drafter's own head;
    -1 in `topk_ids` marks an id the head does not have. `topk_logprobs` is -inf where there is no top-k.
    """

    labels: Tensor
    topk_ids: Tensor
    topk_logprobs: Tensor

    def __getitem__(self, part: slice) -> "Targets":
        """The same for a range of positions of (B, T) targets."""
        return Targets(self.labels[:, part], self.topk_ids[:, part], self.topk_logprobs[:, part])


@dataclass(frozen=True)
class LossSum:
    """A sum over supervised tokens with its own count, so that averages never mix."""

    total: Tensor
    tokens: int
    agreed: int
    """Tokens at which the drafter's argmax is the verifier's."""

    def mean(self) -> Tensor:
        """0 without gradient when nothing was supervised."""
        return self.total / self.tokens if self.tokens else self.total.detach() * 0


def top_k_kl(logprobs_NV: Tensor, topk_ids_NK: Tensor, topk_logprobs_NK: Tensor) -> Tensor:
    """Forward KL from the verifier to the drafter over the verifier's top-k, up to its own entropy: (N,).

    The verifier's mass on those k is renormalised; ids the drafter's head lacks drop out.
    """
    known = topk_ids_NK >= 0
    weights = topk_logprobs_NK.exp() * known
    weights = weights / weights.sum(-1, keepdim=True).clamp_min(1e-9)
    return -(weights * logprobs_NV.gather(-1, topk_ids_NK.clamp_min(0))).sum(-1)


def token_loss(logits_NV: Tensor, targets: Targets, *, kl_weight: float) -> Tensor:
    """(1 - kl_weight) * CE to x* + kl_weight * KL on the verifier's top-k; plain CE where there is no top-k: (N,)."""
    logprobs = logits_NV.float().log_softmax(-1)
    ce = F.nll_loss(logprobs, targets.labels, ignore_index=IGNORE, reduction="none")
    if not kl_weight:
        return ce
    has_top_k = (targets.topk_ids >= 0).any(-1) & torch.isfinite(targets.topk_logprobs).any(-1)
    kl = top_k_kl(logprobs, targets.topk_ids, targets.topk_logprobs)
    supervised = targets.labels != IGNORE
    return torch.where(has_top_k, (1 - kl_weight) * ce + kl_weight * kl, ce) * supervised


def head_loss(head: Callable[[Tensor], Tensor], hidden_BTE: Tensor, targets: Targets, *, kl_weight: float) -> LossSum:
    """The summed loss of hidden states through the output head. Only supervised positions reach the head."""
    supervised = targets.labels != IGNORE
    tokens = int(supervised.sum())
    if not tokens:
        return LossSum(hidden_BTE.sum() * 0, 0, 0)
    picked = Targets(targets.labels[supervised], targets.topk_ids[supervised], targets.topk_logprobs[supervised])
    logits_NV = head(hidden_BTE[supervised])
    agreed = int((logits_NV.argmax(-1) == picked.labels).sum())
    return LossSum(token_loss(logits_NV, picked, kl_weight=kl_weight).sum(), tokens, agreed)
