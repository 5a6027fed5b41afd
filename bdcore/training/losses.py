"""Losses per token against the verifier: pure functions of the drafter's log-probabilities and targets. They are added
up here, with their counts; means are taken late. All are in nats, except total variation, a probability.

Legend: B batch, T positions, N tokens, E hidden width, V outputs of the drafter's head, K top-k, J = 1 + K.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bdcore.config import LossConfig

IGNORE = -100
UNSAYABLE = -1
"""In place of an id that the drafter's pruned head does not have."""
Head = Callable[[Tensor], Tensor]

_FLOOR = -1e4
_NEVER = float("-inf")


@dataclass(frozen=True)
class Targets:
    """Per token: the verifier's greedy id (IGNORE: none is known) and its top-k. Ids of the drafter's own head, or
    UNSAYABLE; a token whose greedy id is unsayable is not supervised. `topk_logprobs` is -inf where there is no top-k.
    """

    labels: Tensor
    topk_ids: Tensor
    topk_logprobs: Tensor

    def __getitem__(self, part: slice) -> "Targets":
        """The same for a range of positions of (B, T) targets."""
        return self.each(lambda x: x[:, part])

    def each(self, change: Callable[[Tensor], Tensor]) -> "Targets":
        """The same with all three tensors changed alike."""
        return Targets(change(self.labels), change(self.topk_ids), change(self.topk_logprobs))

    def picked(self, mask: Tensor) -> "Targets":
        """The tokens where a boolean mask of the shape of `labels` holds, in one row: (N,)."""
        return self.each(lambda x: x[mask])

    def split(self, size: int) -> "Iterator[Targets]":
        """(N,) targets in pieces of at most `size` tokens."""
        parts = (self.labels.split(size), self.topk_ids.split(size), self.topk_logprobs.split(size))
        return (Targets(*part) for part in zip(*parts, strict=True))

    @property
    def supervised(self) -> Tensor:
        """Which tokens are supervised: boolean, of the shape of `labels`."""
        return self.labels >= 0

    @property
    def tokens(self) -> int:
        """How many tokens are supervised."""
        return int(self.supervised.sum())

    @property
    def known(self) -> int:
        """How many tokens have a greedy id, whether the drafter's head can say it or not."""
        return int((self.labels != IGNORE).sum())


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


def cross_entropy(logprobs_NV: Tensor, targets: Targets) -> Tensor:
    """-log q(label): (N,), 0 at tokens that are not supervised."""
    labels = torch.where(targets.supervised, targets.labels, IGNORE)
    return F.nll_loss(logprobs_NV, labels, ignore_index=IGNORE, reduction="none")


def kl(logprobs_NV: Tensor, targets: Targets) -> Tensor:
    """KL(verifier || drafter): (N,). The verifier is its top-k, renormalised over the ids the head has; the drafter
    keeps its whole head, so that mass elsewhere costs. Equals `cross_entropy` where there is no top-k.
    """
    logp_NJ, logq_NJ = _pair(logprobs_NV, targets)
    p_NJ = logp_NJ.softmax(-1)
    return -(p_NJ * logq_NJ).sum(-1) - torch.special.entr(p_NJ).sum(-1)


def reverse_kl(logprobs_NV: Tensor, targets: Targets) -> Tensor:
    """KL(drafter || verifier), both renormalised over the ids of the top-k that the head has: (N,).

    It compares ratios among those ids alone: mass elsewhere is free. Fewer than two ids have no ratio, and a one-hot
    verifier would make it infinite: `cross_entropy` there.
    """
    logp_NJ, logq_NJ = _pair(logprobs_NV, targets)
    unknown = logp_NJ == _NEVER
    logq_NJ = logq_NJ.masked_fill(unknown, _NEVER).log_softmax(-1)
    gap_NJ = (logq_NJ - logp_NJ.log_softmax(-1)).masked_fill(unknown, 0)
    one_hot = (~unknown).sum(-1) < 2
    return torch.where(one_hot, cross_entropy(logprobs_NV, targets), (logq_NJ.exp() * gap_NJ).sum(-1))


def total_variation(logprobs_NV: Tensor, targets: Targets) -> Tensor:
    """1 - alpha, the probability that sampled decoding rejects a token (see `_log_accepted`): (N,).

    1 - q(label) where there is no top-k.
    """
    return -_log_accepted(logprobs_NV, targets).expm1()


def lk(logprobs_NV: Tensor, targets: Targets) -> Tensor:
    """-log(alpha), the acceptance-rate "LK" loss (Samarin et al., arXiv 2602.23881): (N,).

    Its gradient is that of total variation over alpha, so it does not vanish where little is accepted. Equals
    `cross_entropy` where there is no top-k.
    """
    return -_log_accepted(logprobs_NV, targets)


LOSSES: dict[str, Callable[[Tensor, Targets], Tensor]] = {
    "ce": cross_entropy,
    "kl": kl,
    "reverse_kl": reverse_kl,
    "tv": total_variation,
    "lk": lk,
}
"""By their names in `LossConfig`."""


def _log_accepted(logprobs_NV: Tensor, targets: Targets) -> Tensor:
    """log(alpha): (N,). alpha = sum of min(p, q), the probability that sampled speculative decoding accepts.

    p is the verifier's own mass: what it has outside its top-k, or on ids the head lacks, counts as never accepted.
    Sums of logarithms neither underflow nor divide by 0, so gradients stay finite.
    """
    logp_NJ, logq_NJ = _pair(logprobs_NV, targets)
    return torch.minimum(logp_NJ, logq_NJ).logsumexp(-1)


def _pair(logprobs_NV: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """log p of the verifier (-inf: not known) and log q of the drafter on the label and the top-k: (N, J) each.

    The label holds the verifier's whole mass where there is no top-k, and none where there is one.
    """
    known = (targets.topk_ids >= 0) & targets.topk_logprobs.isfinite()
    logp_NK = targets.topk_logprobs.to(logprobs_NV.dtype).masked_fill(~known, _NEVER)
    label = torch.zeros_like(logp_NK[:, :1]).masked_fill(known.any(-1, keepdim=True), _NEVER)
    ids_NJ = torch.cat([targets.labels[:, None], targets.topk_ids], 1).clamp_min(0)
    # A floor no real logit reaches: with a logit of -inf, 0 * log q and the gradient of logsumexp would be NaN.
    return torch.cat([label, logp_NK], 1), logprobs_NV.gather(-1, ids_NJ).clamp_min(_FLOOR)


def token_loss(logits_NV: Tensor, targets: Targets, weights: LossConfig) -> Tensor:
    """The sum of the losses by their `weights`: (N,), 0 where not supervised. Every supervised token weighs the same.

    In fp32 (fp64 for fp64 logits). Losses of weight 0 are not computed.
    """
    logprobs = _precise(logits_NV).log_softmax(-1)
    terms = [weight * LOSSES[name](logprobs, targets) for name, weight in weights.model_dump().items() if weight]
    return torch.where(targets.supervised, torch.stack(terms).sum(0), 0)


def _precise(values: Tensor) -> Tensor:
    return values if values.dtype == torch.float64 else values.float()


def head_loss(head: Head, hidden_BTE: Tensor, targets: Targets, weights: LossConfig, *, chunk: int = 512) -> LossSum:
    """`head_loss_reference` in the memory of `chunk` tokens' logits: the head reads at most that many at a time, and
    its logits are computed again in the backward pass. `head` must give the same logits both times.
    """
    piece_loss = partial(checkpoint, _piece_loss, use_reentrant=False) if torch.is_grad_enabled() else _piece_loss
    pieces = _pieces(hidden_BTE, targets, chunk)
    return _added([piece_loss(head, weights, *piece) for piece in pieces], hidden_BTE, targets)


def head_loss_reference(head: Head, hidden_BTE: Tensor, targets: Targets, weights: LossConfig) -> LossSum:
    """The summed loss of hidden states through the output head ((N, E) to logits (N, V)), eager and in one piece.

    Only supervised positions reach the head.
    """
    pieces = _pieces(hidden_BTE, targets, targets.labels.numel())
    return _added([_piece_loss(head, weights, *piece) for piece in pieces], hidden_BTE, targets)


def _pieces(hidden_BTE: Tensor, targets: Targets, size: int) -> Iterator[tuple[Tensor, Targets]]:
    """Hidden states and targets of the supervised tokens, at most `size` at a time."""
    mask = targets.supervised
    hidden_NE, picked = hidden_BTE[mask], targets.picked(mask)
    if not len(hidden_NE):
        return iter(())
    return zip(hidden_NE.split(size), picked.split(size), strict=True)


def _piece_loss(head: Head, weights: LossConfig, hidden_NE: Tensor, targets: Targets) -> tuple[Tensor, Tensor]:
    """Summed loss and agreement of some tokens."""
    logits_NV = head(hidden_NE)
    total = token_loss(logits_NV, targets, weights).sum()
    return total, (logits_NV.argmax(-1) == targets.labels).sum()


def _added(sums: list[tuple[Tensor, Tensor]], hidden_BTE: Tensor, targets: Targets) -> LossSum:
    if not sums:  # the sum of nothing: on the graph, and 0 even where hidden states are not finite
        return LossSum(_precise(hidden_BTE[:0]).sum(), 0, 0)
    totals, agreed = zip(*sums, strict=True)
    return LossSum(torch.stack(totals).sum(), targets.tokens, int(torch.stack(agreed).sum()))
