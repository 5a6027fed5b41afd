"""The verifier's greedy tokens x* with its top-k log-probabilities, on human text or on its own continuations.

Legend: B batch, T tokens, V vocabulary, K top-k.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bdcore.models.stepper import CachePlan, Stepper


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
    """(ids, log-probabilities) of the k largest entries of the last dimension, in fp32."""
    best = logits.float().topk(k)
    return best.indices, best.values - logits.float().logsumexp(-1, keepdim=True)


@torch.inference_mode()
def forced(verifier: Any, ids: list[int], *, top_k: int, chunk: int = 512) -> Greedy:
    """x* after every position of a text: entry i is the verifier's choice after ids[: i + 1]."""
    stepper = Stepper(verifier, CachePlan(capacity=len(ids), block=chunk))
    out = Greedy()
    for start in range(0, len(ids), chunk):
        top_ids, logprobs = top_logprobs(stepper.feed(ids[start : start + chunk])[0], top_k)
        out.add(top_ids, logprobs)
    return out


@torch.inference_mode()
def generated(
    verifier: Any,
    prompts: list[list[int]],
    *,
    new_tokens: int,
    top_k: int,
    eos: Container[int],
    on_step: Callable[[int], None] = lambda step: None,
) -> list[Greedy]:
    """The verifier's own greedy continuations of prompts of one length, together. EOS is kept and ends a row.

    `on_step` is told the number of tokens each row has got.
    """
    lengths = {len(prompt) for prompt in prompts}
    if len(lengths) != 1:
        raise ValueError(f"prompts of one length are needed, got lengths {sorted(lengths)}")
    stepper = Stepper(verifier, CachePlan(capacity=lengths.pop() + new_tokens))
    rows = [Greedy() for _ in prompts]
    logits_BV = stepper.prefill(torch.tensor(prompts))
    for step in range(new_tokens):
        top_ids_BK, logprobs_BK = top_logprobs(logits_BV, top_k)
        for row, top_ids, logprobs in zip(rows, top_ids_BK, logprobs_BK, strict=True):
            if row.finish_reason != "eos":
                row.add(top_ids[None], logprobs[None])
                if row.ids[-1] in eos:
                    row.finish_reason = "eos"
        on_step(step + 1)
        if step == new_tokens - 1 or all(row.finish_reason == "eos" for row in rows):
            break
        logits_BV = stepper.feed(top_ids_BK[:, :1])[:, -1]
    return rows
