"""How the next token is chosen from logits: greedy or sampled, after penalties; the same for verifier and drafter.

Penalties and warpers are transformers' own, in its order, so that a distribution here is the one `generate` draws from.
Drawing takes its random number from outside.

Legend: T positions, V vocabulary.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

COLDEST = 1e-4
"""Temperatures below this are greedy: logits divided by less leave only the best token in float32."""


@dataclass(frozen=True)
class Sampling:
    """What is done to the logits before a token is chosen. The default is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    """Only the k most probable tokens; 0: all."""
    top_p: float = 1.0
    """Only the most probable tokens that together reach this probability."""
    repetition_penalty: float = 1.0
    """Divides (multiplies) the positive (negative) logits of every token already in the sequence."""
    min_new_tokens: int = 0
    """No EOS before this many tokens."""

    def __post_init__(self) -> None:
        for name, legal, ok in (
            ("temperature", "0 (greedy) or more", math.isfinite(self.temperature) and self.temperature >= 0),
            ("top_k", "0 (all) or more", self.top_k >= 0),
            ("top_p", "above 0, at most 1", 0 < self.top_p <= 1),
            ("repetition_penalty", "above 0; 1 is none", 0 < self.repetition_penalty < math.inf),
            ("min_new_tokens", "0 or more", self.min_new_tokens >= 0),
        ):
            if not ok:
                raise ValueError(f"{name} = {getattr(self, name)}: legal is {legal}")

    @property
    def greedy(self) -> bool:
        return self.temperature < COLDEST


GREEDY = Sampling()


class Chooser:
    """Logits to scores, tokens and distributions of one sequence."""

    def __init__(self, sampling: Sampling, *, prompt_len: int, eos: Collection[int], device: Any) -> None:
        self.sampling = sampling
        # Any: they ask for a LongTensor, which no torch function says it returns.
        self._history: Any = LogitsProcessorList()
        self._shape: Any = LogitsProcessorList()
        if sampling.repetition_penalty != 1.0:
            self._history.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
        if sampling.min_new_tokens and eos:
            self._history.append(
                MinNewTokensLengthLogitsProcessor(prompt_len, sampling.min_new_tokens, sorted(eos), device=device)
            )
        if not sampling.greedy:
            self._shape.append(TemperatureLogitsWarper(sampling.temperature))
            if sampling.top_k:
                self._shape.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._shape.append(TopPLogitsWarper(sampling.top_p))

    @property
    def plain(self) -> bool:
        """The best logit is the token: nothing to compute."""
        return self.sampling.greedy and not self._history

    def scores(self, logits_TV: Tensor, sequence: list[int]) -> Tensor:
        """Logits after penalties, fp32. The sequence ends with the T - 1 tokens after the first position: position i
        sees all but its last T - 1 - i tokens, drafts before it included.
        """
        logits_TV = logits_TV.float()
        if not self._history:
            return logits_TV
        T, ids_1L = logits_TV.shape[0], torch.tensor([sequence], device=logits_TV.device)
        seen = len(sequence) - (T - 1)
        return torch.cat([self._history(ids_1L[:, : seen + i], logits_TV[i : i + 1].clone()) for i in range(T)])

    def best(self, logits_TV: Tensor, sequence: list[int]) -> list[int]:
        """The greedy token at each position."""
        return (logits_TV if self.plain else self.scores(logits_TV, sequence)).argmax(-1).tolist()

    def probabilities(self, logits_TV: Tensor, sequence: list[int]) -> Tensor:
        """The distribution at each position, warped: (T, V) in fp32."""
        scores_TV = self.scores(logits_TV, sequence)
        return self._shape(torch.empty(0), scores_TV).softmax(-1)


def draw(weights_V: Tensor, uniform: float) -> int:
    """A token with probability proportional to its weight, by inversion of `uniform` in [0, 1). Never one of weight 0.

    Sums in fp64: in fp32 the tail of a large vocabulary is lost.
    """
    sums_V = weights_V.double().cumsum(0)
    at = int(torch.searchsorted(sums_V, uniform * float(sums_V[-1]), right=True))
    if at >= len(sums_V):  # uniform = 1.0, or rounding at the end
        at = int(weights_V.nonzero()[-1])
    assert weights_V[at] > 0, f"drew token {at} of weight 0"
    return at
