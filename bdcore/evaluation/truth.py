"""The verifier along one document: what it would say at each position, and what it makes of drafts there.

One pass serves every drafter, and what was learned of a document may be known from another study's pass: then the
verifier reads only where drafts of several tokens must be checked. Between calls its cache holds no more than the
document up to the current position.

Legend: B windows, W tokens of each, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from bdcore.decoding.decoder import first_mismatch
from bdcore.decoding.sequence import look
from bdcore.models.stepper import CachePlan, Stepper

Known = dict[int, tuple[int, bool]]
"""Position -> the verifier's choice, and whether it is another one from the newest tokens alone."""


class Truth:
    """The verifier's greedy choices at ascending positions; position p comes after the first p tokens."""

    def __init__(
        self,
        verifier: Any,
        ids: list[int],
        positions: Sequence[int],
        *,
        gamma: int,
        chunk: int,
        observe: int = 0,
        far_window: int | None = None,
        known: Known | None = None,
    ) -> None:
        """`known` is filled with what is found."""
        block = max(gamma, 2)
        plan = CachePlan(max(positions) + block, block=block, prefill_chunk=chunk, observe=observe)
        self.stepper = Stepper(verifier, plan)
        self.ids, self.positions, self.far_window = ids, positions, far_window
        self.known: Known = {} if known is None else known
        self.position = 0
        self.choice = -1
        """The greedy token at the current position."""
        self.far = False
        """Whether it is another one when the verifier sees its newest `far_window` tokens alone."""
        self._verdicts: dict[tuple[int, ...], int] = {}
        self._near: dict[int, int] = {}
        self._look = look(self.stepper)

    def read(self, position: int) -> None:
        """Go on to a later position."""
        self.position = position
        self._verdicts.clear()
        if position not in self.known:
            self.known[position] = self._find(position)
        self.choice, self.far = self.known[position]

    def oracle(self) -> Tensor:
        """The verifier's attention on the document so far."""
        self._catch_up()
        return self._look()

    def _find(self, position: int) -> tuple[int, bool]:
        choice = int(self._catch_up()[0].argmax())
        far = self.far_window is not None and position > self.far_window and self._nearly(position) != choice
        return choice, far

    def _catch_up(self) -> Tensor:
        """Read up to the current position; logits there where anything was left to read: (1, V)."""
        return self.stepper.prefill(self.ids[self.stepper.logical : self.position])

    def accepted(self, drafts: Sequence[int]) -> int:
        """How many of the drafts the verifier says itself, one after the other."""
        key = tuple(drafts)
        if key not in self._verdicts:
            self._verdicts[key] = self._verify(key)
        return self._verdicts[key]

    @torch.inference_mode()
    def _verify(self, drafts: tuple[int, ...]) -> int:
        if not drafts or drafts[0] != self.choice:
            return 0
        said = [self.choice]
        if len(drafts) > 1:
            self._catch_up()
            said += self.stepper.feed(drafts[:-1])[0].argmax(-1).tolist()
            self.stepper.rollback(len(drafts) - 1)
        wrong = first_mismatch(list(drafts), said)
        return len(drafts) if wrong is None else wrong

    def _nearly(self, position: int) -> int:
        """The choice from the newest tokens alone; as many windows together as fill one piece of a prefill."""
        if position not in self._near:
            assert self.far_window is not None
            batch = max(1, self.stepper.plan.prefill_chunk // self.far_window)
            due = [p for p in self.positions if p >= position][:batch]
            windows_BW = torch.tensor([self.ids[p - self.far_window : p] for p in due])
            plan = CachePlan(self.far_window, prefill_chunk=self.far_window)
            logits_BV = Stepper(self.stepper.model, plan).prefill(windows_BW)
            self._near = dict(zip(due, logits_BV.argmax(-1).tolist(), strict=True))
        return self._near[position]
