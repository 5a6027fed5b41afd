"""The verifier's greedy tokens x* with its top-k log-probabilities, on human text or on its own continuations.

Legend: N rows that run now, T tokens, V vocabulary, K top-k.
"""

from collections import deque
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bdcore.models.stepper import CachePlan, Stepper, feed_together

OnTokens = Callable[[int], None]
"""Told how many tokens have been made so far."""


def _quiet(tokens: int) -> None:
    pass


@dataclass
class Greedy:
    """Greedy tokens of one sequence and the top-k ids and log-probabilities they were chosen from."""

    ids: list[int] = field(default_factory=list)
    topk_ids: list[list[int]] = field(default_factory=list)
    topk_logprobs: list[list[float]] = field(default_factory=list)
    finish_reason: str = "length"

    def add(self, top_ids_TK: Tensor, top_logprobs_TK: Tensor) -> None:
        self.ids += top_ids_TK[:, 0].tolist()
        self.topk_ids += top_ids_TK.tolist()
        self.topk_logprobs += top_logprobs_TK.tolist()


def top_logprobs(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """(ids, log-probabilities) of the k largest entries of the last dimension, in fp32; the first is the argmax.

    Half precision has many equal logits, of which `topk` may put another first than `argmax`, by which decoding
    chooses. The two change places; their log-probabilities are the same.
    """
    scores = logits.float()
    (values, ids), first = scores.topk(k), scores.argmax(-1, keepdim=True)
    ids = torch.cat([first, torch.where(ids == first, ids[..., :1], ids)[..., 1:]], -1)
    return ids, values - scores.logsumexp(-1, keepdim=True)


@torch.inference_mode()
def forced(verifier: Any, ids: list[int], *, top_k: int, chunk: int = 512, on_tokens: OnTokens = _quiet) -> Greedy:
    """x* after every position of a text: entry i is the verifier's choice after ids[: i + 1]."""
    stepper = Stepper(verifier, CachePlan(capacity=len(ids), block=chunk))
    out = Greedy()
    for start in range(0, len(ids), chunk):
        top_ids, logprobs = top_logprobs(stepper.feed(ids[start : start + chunk])[0], top_k)
        out.add(top_ids, logprobs)
        on_tokens(len(out.ids))
    return out


@dataclass
class _Row:
    """One continuation: its own cache, and what it has got so far."""

    stepper: Stepper
    most: int
    greedy: Greedy = field(default_factory=Greedy)

    def add(self, top_ids_K: Tensor, top_logprobs_K: Tensor, eos: Container[int]) -> None:
        self.greedy.add(top_ids_K[None], top_logprobs_K[None])
        if self.greedy.ids[-1] in eos:
            self.greedy.finish_reason = "eos"

    @property
    def ended(self) -> bool:
        return self.greedy.finish_reason == "eos" or len(self.greedy.ids) == self.most


def generated(
    verifier: Any,
    prompts: Sequence[list[int]],
    *,
    new_tokens: int,
    top_k: int,
    eos: Container[int],
    batch_size: int,
    on_tokens: OnTokens = _quiet,
) -> Iterator[Greedy]:
    """The verifier's own greedy continuations, in the order of the prompts; EOS is kept and ends its row.

    At most `batch_size` rows run at once, each over its own cache; when one ends, the next prompt takes its place.
    """
    waiting, order, running, made = deque(prompts), deque[_Row](), list[_Row](), 0
    while waiting or order:
        logits_1V = _next_logits(running)
        while waiting and len(running) < batch_size:
            prompt = waiting.popleft()
            row = _Row(Stepper(verifier, CachePlan(capacity=len(prompt) + new_tokens)), new_tokens)
            logits_1V.append(row.stepper.prefill(prompt))
            running.append(row)
            order.append(row)
        for row, ids_K, logprobs_K in zip(running, *top_logprobs(torch.cat(logits_1V), top_k), strict=True):
            row.add(ids_K, logprobs_K, eos)
        made += len(running)
        on_tokens(made)
        running = [row for row in running if not row.ended]
        while order and order[0].ended:
            yield order.popleft().greedy


def _next_logits(rows: list[_Row]) -> list[Tensor]:
    """Logits after the newest token of each row, one forward for all: (1, V) each."""
    if not rows:
        return []
    return feed_together([row.stepper for row in rows], [row.greedy.ids[-1:] for row in rows], last_only=True)
