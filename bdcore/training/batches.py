"""Training sequences from target rows: which kind, which row, which window. Drawn by (seed, step), so never by order.

Legend: B batch, T tokens, K top-k.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bdcore.config import ConfigError, MixtureConfig
from bdcore.documents import origin_of
from bdcore.models.drafter import Drafter
from bdcore.runtime import seed_for
from bdcore.targets.prompts import one_text
from bdcore.targets.rows import TargetRow, TargetRows
from bdcore.training.losses import IGNORE, UNSAYABLE, Targets

Ids = NDArray[np.int32]
_NONE = float("-inf")


@dataclass(frozen=True)
class Tokens:
    """A sequence with the verifier's greedy id after each token, in the verifier's vocabulary."""

    ids: Ids
    """(T,)"""
    labels: Ids
    topk_ids: Ids
    """(T, K)"""
    topk_logprobs: NDArray[np.float32]

    def __len__(self) -> int:
        return len(self.ids)

    def window(self, start: int, length: int) -> "Tokens":
        """`length` tokens from `start`; past the end, unsupervised filling."""
        cut = slice(start, start + length)
        fill = max(0, start + length - len(self))
        return Tokens(
            np.pad(self.ids[cut], (0, fill), mode="edge"),
            np.pad(self.labels[cut], (0, fill), constant_values=IGNORE),
            np.pad(self.topk_ids[cut], ((0, fill), (0, 0)), constant_values=IGNORE),
            np.pad(self.topk_logprobs[cut], ((0, fill), (0, 0)), constant_values=_NONE),
        )


@dataclass(frozen=True)
class Batch:
    ids_BT: Tensor
    targets: Targets


def from_row(row: TargetRow) -> Tokens:
    """A target row as tokens: a forced row is supervised everywhere, a generated one on its continuation."""
    if row.mode == "forced":
        return Tokens(row.prompt_ids, row.target_ids, row.topk_ids, row.topk_logprobs)
    unsupervised = _unsupervised(row)
    return Tokens(
        np.concatenate([row.prompt_ids, row.target_ids[:-1]]),
        np.pad(row.target_ids, (unsupervised, 0), constant_values=IGNORE),
        np.pad(row.topk_ids, ((unsupervised, 0), (0, 0)), constant_values=IGNORE),
        np.pad(row.topk_logprobs, ((unsupervised, 0), (0, 0)), constant_values=_NONE),
    )


def _unsupervised(row: TargetRow) -> int:
    """Tokens of a row before the first that has a label."""
    return 0 if row.mode == "forced" else len(row.prompt_ids) - 1


def repeated(passage: Ids, length: int, k: int) -> Tokens:
    """A passage repeated to `length`; from its second occurrence on, the label is the copy."""
    n = len(passage)
    ids = np.tile(passage, length // n + 2)
    labels = ids[1 : length + 1].copy()
    labels[: n - 1] = IGNORE
    return Tokens(ids[:length], labels, np.full((length, k), IGNORE, np.int32), np.full((length, k), _NONE, np.float32))


class Sampler:
    """Draws training windows of a wanted length from some rows of a target set, which stay on disk until drawn.

    Raises ConfigError where none of them is of a kind that the mixture asks for.
    """

    def __init__(self, rows: TargetRows, use: Sequence[int], mixture: MixtureConfig, seed: int) -> None:
        self.rows, self.mixture, self.seed = rows, mixture, seed
        self.forced = [i for i in use if rows.modes[i] == "forced"]
        self.generated = [i for i in use if rows.modes[i] == "generated"]
        have = {"forced": self.forced, "generated": self.generated, "repeated": self.forced}
        for kind, weight in mixture.model_dump().items():
            if weight and not have[kind]:
                raise ConfigError(none_left(kind, weight))

    def draw(self, step: int, index: int, length: int) -> Tokens:
        """Window `index` of a step."""
        rng = random.Random(seed_for(self.seed, "window", step, index))
        weights = self.mixture.model_dump()
        kind = rng.choices(list(weights), list(weights.values()))[0]
        if kind == "repeated":
            return self._repeated(rng, length)
        use = self.generated if kind == "generated" else [i for i in self.forced if self.rows.lengths[i] >= length]
        row = self.rows[rng.choice(use)]
        tokens, unsupervised = from_row(row), _unsupervised(row)
        # A window ends on a label: within the prompt of a continuation nothing is taught. Generated rows are filled
        # up: their last token is only a label, and leaving out those that ended early would hide every EOS.
        first, last = max(0, unsupervised + 1 - length), max(0, len(tokens) - length)
        return tokens.window(rng.randrange(first, last + 1), length)

    def _repeated(self, rng: random.Random, length: int) -> Tokens:
        tokens = from_row(self.rows[rng.choice(self.forced)])
        n = rng.randrange(16, max(17, length // 2))
        start = rng.randrange(len(tokens) - n + 1)
        return repeated(tokens.ids[start : start + n], length, tokens.topk_ids.shape[1])


def none_left(kind: str, weight: float) -> str:
    """Why a mixture cannot be had, and what to do."""
    source = "generated" if kind == "generated" else "forced"
    return (
        f"mixture.{kind} = {weight:g}: no {source} sequence is left to train on, validation holds out the documents of "
        f"all; raise targets.{source}, lower validation.sequences, or set mixture.{kind} = 0"
    )


def split_validation(rows: TargetRows, count: int) -> tuple[list[int], list[int]]:
    """(training rows, validation rows): the last `count` forced rows and all else of their texts are held out.

    Validation rows are the forced ones.
    """
    forced = [i for i, mode in enumerate(rows.modes) if mode == "forced"]
    last = [rows[i] for i in forced[len(forced) - count :]]
    origins = {origin_of(row.doc_id) for row in last}
    held_out = {i for i, doc in enumerate(rows.doc_ids) if origin_of(doc) in origins}
    for i, mode in enumerate(rows.modes):  # forced rows are distinct already, whatever their names
        if mode == "generated" and i not in held_out and any(_of_one_text(rows[i], row) for row in last):
            held_out.add(i)
    return [i for i in range(len(rows)) if i not in held_out], [i for i in forced if i in held_out]


def _of_one_text(row: TargetRow, other: TargetRow) -> bool:
    return one_text(row.doc_id, row.prompt_ids, other.doc_id, other.prompt_ids)


def collate(windows: list[Tokens], to_head: Tensor | None, device: str) -> Batch:
    """Windows of one length as tensors; `to_head[id]` is the drafter head's output for an id, or UNSAYABLE."""

    def stacked(name: str) -> Tensor:
        return torch.from_numpy(np.stack([getattr(w, name) for w in windows])).to(device)

    ids, labels, topk_ids = (stacked(name).long() for name in ("ids", "labels", "topk_ids"))
    if to_head is not None:
        labels = torch.where(labels == IGNORE, IGNORE, to_head[labels.clamp_min(0)])
        topk_ids = torch.where(topk_ids == IGNORE, UNSAYABLE, to_head[topk_ids.clamp_min(0)])
    return Batch(ids, Targets(labels, topk_ids, stacked("topk_logprobs")))


def collate_for(drafter: Drafter, windows: list[Tokens]) -> Batch:
    """Windows as the tensors this drafter learns from, on its device."""
    model = drafter.model
    return collate(windows, head_index(drafter.ids, model.config.vocab_size), str(model.device))


def head_index(ids: Tensor | None, vocab_size: int) -> Tensor | None:
    """For each id of the vocabulary its output in a pruned head, UNSAYABLE where it was dropped."""
    if ids is None:
        return None
    index = torch.full((vocab_size,), UNSAYABLE, dtype=torch.long, device=ids.device)
    index[ids] = torch.arange(len(ids), device=ids.device)
    return index
