"""Training sequences from target rows: which kind, which row, which window. Drawn by (seed, step), so never by order.

Legend: B batch, T tokens, K top-k.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bdcore.config import MixtureConfig
from bdcore.runtime import seed_for
from bdcore.training.losses import IGNORE, Targets

_NONE = float("-inf")


@dataclass(frozen=True)
class Tokens:
    """A sequence with the verifier's greedy id after each token, in the verifier's vocabulary."""

    ids: list[int]
    labels: list[int]
    topk_ids: list[list[int]]
    topk_logprobs: list[list[float]]

    def window(self, start: int, length: int) -> "Tokens":
        """`length` tokens from `start`; past the end, unsupervised filling."""
        cut = slice(start, start + length)
        fill, k = max(0, start + length - len(self.ids)), len(self.topk_ids[0])
        return Tokens(
            self.ids[cut] + self.ids[-1:] * fill,
            self.labels[cut] + [IGNORE] * fill,
            self.topk_ids[cut] + [[IGNORE] * k] * fill,
            self.topk_logprobs[cut] + [[_NONE] * k] * fill,
        )


@dataclass(frozen=True)
class Batch:
    ids_BT: Tensor
    targets: Targets


def from_row(row: dict[str, Any]) -> Tokens:
    """A target row as tokens: a forced row is supervised everywhere, a generated one on its continuation."""
    prompt, target = row["prompt_ids"], row["target_ids"]
    if row["mode"] == "forced":
        return Tokens(prompt, target, row["topk_ids"], row["topk_logprobs"])
    k, unsupervised = len(row["topk_ids"][0]), len(prompt) - 1
    return Tokens(
        prompt + target[:-1],
        [IGNORE] * unsupervised + target,
        [[IGNORE] * k] * unsupervised + row["topk_ids"],
        [[_NONE] * k] * unsupervised + row["topk_logprobs"],
    )


def repeated(passage: list[int], length: int, k: int) -> Tokens:
    """A passage repeated to `length`; from its second occurrence on, the label is the copy."""
    n = len(passage)
    ids = (passage * (length // n + 2))[: length + 1]
    labels = [IGNORE] * (n - 1) + ids[n:]
    return Tokens(ids[:length], labels[:length], [[IGNORE] * k] * length, [[_NONE] * k] * length)


class Sampler:
    """Draws training windows of a wanted length from the rows of a target set."""

    def __init__(self, rows: Sequence[dict[str, Any]], mixture: MixtureConfig, seed: int) -> None:
        self.forced = [from_row(r) for r in rows if r["mode"] == "forced"]
        self.generated = [from_row(r) for r in rows if r["mode"] == "generated"]
        self.mixture, self.seed = mixture, seed

    def draw(self, step: int, index: int, length: int) -> Tokens:
        """Window `index` of a step's batch."""
        rng = random.Random(seed_for(self.seed, "window", step, index))
        weights = self.mixture.model_dump()
        kind = rng.choices(list(weights), list(weights.values()))[0]
        if kind == "repeated":
            return self._repeated(rng, length)
        rows = self.generated if kind == "generated" else []
        tokens = rng.choice(rows or [t for t in self.forced if len(t.ids) >= length])
        # Generated rows are filled up: their last token is only a label, and leaving out those that ended early
        # would hide every EOS from the drafter.
        return tokens.window(rng.randrange(max(0, len(tokens.ids) - length) + 1), length)

    def _repeated(self, rng: random.Random, length: int) -> Tokens:
        tokens = rng.choice(self.forced)
        n = rng.randrange(16, max(17, length // 2))
        start = rng.randrange(len(tokens.ids) - n + 1)
        return repeated(tokens.ids[start : start + n], length, len(tokens.topk_ids[0]))


def collate(windows: list[Tokens], to_head: Tensor | None, device: str) -> Batch:
    """Windows of one length as tensors; `to_head[id]` is the drafter head's output for an id, or -1."""
    ids = torch.tensor([w.ids for w in windows], device=device)
    labels = torch.tensor([w.labels for w in windows], device=device)
    topk_ids = torch.tensor([w.topk_ids for w in windows], device=device)
    logprobs = torch.tensor([w.topk_logprobs for w in windows], device=device)
    if to_head is not None:
        labels = torch.where(labels == IGNORE, IGNORE, to_head[labels.clamp_min(0)])
        labels = torch.where(labels == -1, IGNORE, labels)  # the head cannot say it: nothing to learn there
        topk_ids = torch.where(topk_ids == IGNORE, -1, to_head[topk_ids.clamp_min(0)])
    return Batch(ids, Targets(labels, topk_ids, logprobs))


def head_index(ids: Tensor | None, vocab_size: int) -> Tensor | None:
    """For each id of the vocabulary its output in a pruned head, -1 where it was dropped."""
    if ids is None:
        return None
    index = torch.full((vocab_size,), -1, dtype=torch.long, device=ids.device)
    index[ids] = torch.arange(len(ids), device=ids.device)
    return index
