"""One sequence while it is decoded: its tokens, its drafter's cache, what each round did to it."""

import math
import time
from collections.abc import Collection

import torch
from torch import Tensor

from bdcore.decoding.accept import accept_greedy, accept_sampled, commit
from bdcore.decoding.draft_length import DraftRule
from bdcore.decoding.lookup import LookupProposer
from bdcore.decoding.records import Decoded, Round
from bdcore.decoding.sampling import Chooser, Sampling, draw
from bdcore.decoding.stops import StopStrings
from bdcore.kv.storage import KVStorage
from bdcore.models.drafter import Drafter
from bdcore.models.stepper import CachePlan, Oracle, Stepper


class Row:
    """One sequence of a batch. `tokens` are the new ones; the verifier has been fed all but the last."""

    def __init__(
        self,
        verifier: Stepper,
        prompt: list[int],
        rule: DraftRule,
        new_tokens: int,
        eos: Collection[int],
        sampling: Sampling,
        seed: int,
        stop: StopStrings | None,
    ) -> None:
        self.verifier, self.prompt, self.new_tokens, self.eos = verifier, prompt, new_tokens, eos
        self.chooser = Chooser(sampling, prompt_len=len(prompt), eos=eos, device=verifier.model.device)
        self.length = rule.start()
        self.proposer: Proposer | LookupProposer | None = None
        self.tokens: list[int] = []
        self.reason: str | None = None
        self.draft: list[int] = []
        self.drafted_from: list[Tensor] = []
        """The distributions the drafts were drawn from; empty when greedy."""
        self.drawn_from: list[Tensor] = []
        """The verifier's distributions at the newest round's drafts and after them; empty when greedy."""
        self._random = torch.Generator().manual_seed(seed)
        self._stop = stop
        self._rounds: list[Round] = []
        self._ties: list[tuple[float, float]] = []
        self._accepted_at, self._drafted_at = [0] * rule.gamma, [0] * rule.gamma
        self._prefill_s = self._decode_s = 0.0
        self._emitted = self._counted = self._drafted = 0

    @property
    def sequence(self) -> list[int]:
        return [*self.prompt, *self.tokens]

    @property
    def remaining(self) -> int:
        return self.new_tokens - len(self.tokens)

    def unread(self) -> list[int]:
        """Tokens and drafts that the verifier has not been fed: the last token and the drafts, or more where it drafts
        for another and fell behind.
        """
        return unread(self, self.verifier)

    def uniform(self) -> float:
        """The row's own next random number: the same whoever else is in the batch."""
        return float(torch.rand((), generator=self._random, dtype=torch.float64))

    def fork(self) -> int:
        """A seed for another stream of random numbers, the row's own too."""
        return int(torch.randint(2**62, (), generator=self._random))

    def begin(self, logits_V: Tensor, prefill_s: float) -> None:
        """The first token, which the prompt's last logits give."""
        self._prefill_s = prefill_s
        _, own = self.verdict(logits_V[None])
        self.commit(0, own)

    @torch.inference_mode()
    def verdict(self, logits_TV: Tensor) -> tuple[int, int]:
        """(drafts accepted, the verifier's own next token), from its logits after the last token and every draft."""
        ids = [*self.sequence, *self.draft] if not self.chooser.plain else []
        if self.proposer is None:
            self._ties.append(near_tie(self.chooser.scores(logits_TV[:1], ids)[0], logits_TV.dtype))
        if self.chooser.sampling.greedy:
            return accept_greedy(self.draft, self.chooser.best(logits_TV, ids))
        p_TV = self.chooser.probabilities(logits_TV, ids)
        self.drawn_from = list(p_TV)
        return accept_sampled(self.draft, p_TV, self.drafted_from, [self.uniform() for _ in range(len(self.draft) + 1)])

    def commit(self, accepted: int, own: int) -> None:
        """Emit what was accepted and the verifier's own token; take everything else back from the verifier's cache."""
        stops = None if self._stop is None else self._stopped
        emitted, self._counted, self.reason = commit(
            self.draft, accepted, own, eos=self.eos, remaining=self.remaining, stops=stops
        )
        self._emitted = len(emitted)
        # Drafts after a stop are not counted as drafted; a rejected one before it is.
        self._drafted = self._counted if len(emitted) <= accepted else len(self.draft)
        self.tokens += emitted
        self.verifier.rollback(max(0, self.verifier.logical - (len(self.prompt) + len(self.tokens) - 1)))

    def _stopped(self, block: list[int]) -> bool:
        assert self._stop is not None
        return self._stop.hit([*self.tokens, *block])

    def record(self, *, draft_s: float, select_s: float, verify_s: float, overhead_s: float) -> None:
        """Note the round that was just committed."""
        for i in range(self._drafted):
            self._drafted_at[i] += 1
            self._accepted_at[i] += i < self._counted
        self._decode_s += draft_s + select_s + verify_s + overhead_s
        self.length.learn(drafted=len(self.draft), accepted=self._counted, draft_s=draft_s, verify_s=verify_s)
        cache = self.proposer.cache if self.proposer else None
        self._rounds.append(
            Round(
                drafted=self._drafted,
                accepted=self._counted,
                emitted=self._emitted,
                draft_s=draft_s,
                select_s=select_s,
                verify_s=verify_s,
                overhead_s=overhead_s,
                drafter_cached=cache.physical if cache else 0,
                drafter_kv_bytes=self.proposer.kv_bytes if self.proposer else 0,
                verifier_kv_bytes=self.verifier.cache.bytes(),
            )
        )

    def result(self) -> Decoded:
        assert self.reason is not None
        cache = self.proposer.cache if self.proposer else None
        ties = self._ties if self.proposer is None else []
        return Decoded(
            self.tokens,
            self.reason,
            self._rounds,
            self._prefill_s,
            self.proposer.prefill_s if self.proposer else 0.0,
            self._decode_s,
            drafter_cached_peak=cache.peak_physical if cache else 0,
            drafter_kv_bytes=self.proposer.kv_bytes if self.proposer else 0,
            verifier_kv_bytes=self.verifier.cache.bytes(),
            accepted_at=self._accepted_at,
            drafted_at=self._drafted_at,
            gaps=[gap for gap, _ in ties],
            gap_steps=[steps for _, steps in ties],
        )


class Proposer:
    """A drafter and its cache along one row."""

    def __init__(self, drafter: Drafter, plan: CachePlan, row: Row) -> None:
        start = time.perf_counter()
        self.drafter, self.row = drafter, row
        self.stepper = Stepper(drafter.model, plan.sized(len(row.prompt) + row.new_tokens), oracle=look(row.verifier))
        self._vocab = row.verifier.model.config.vocab_size
        self._readable = drafter.model.config.vocab_size
        self._wanted = self._settled = 0
        self.stepper.prefill(row.prompt)
        self.stepper.fit()
        self.prefill_s = time.perf_counter() - start

    @property
    def cache(self) -> KVStorage:
        return self.stepper.cache

    @property
    def kv_bytes(self) -> int:
        """Bytes of the drafter's keys and values, as allocated."""
        return self.cache.bytes()

    def start(self) -> bool:
        """Ready for a round: whether the row wants drafts. Reads what is too long for one block."""
        self._wanted = min(self.row.length.next(), self.row.remaining - 1)
        return self._wanted > 0 and self.catch_up(self._wanted)

    def catch_up(self, wanted: int) -> bool:
        """Whether it can draft. Reads on where what is unread leaves no room in a block for `wanted` drafts."""
        unread = self.unread()
        # A padding id of the verifier's head that a smaller drafter cannot read: the verifier goes on alone.
        if max(unread) >= self._readable:
            return False
        behind = unread[:-1]
        if len(behind) + wanted > self.stepper.plan.block:  # after rounds without drafting
            self.stepper.prefill(behind)
            self.stepper.fit()
        return True

    def unread(self) -> list[int]:
        """Tokens and drafts that the drafter has not been fed."""
        return unread(self.row, self.stepper)

    @torch.inference_mode()
    def draw(self, logits_1V: Tensor) -> bool:
        """Draft one token from the drafter's logits; whether to go on."""
        row, chooser = self.row, self.row.chooser
        if row.length.threshold is not None and not row.length.goes_on(float(logits_1V.float().softmax(-1).max())):
            return False
        if chooser.plain:
            row.draft.append(int(self.drafter.to_ids(logits_1V[0].argmax(-1))))
        else:
            spread_1V = self.drafter.spread(logits_1V, self._vocab)
            ids = [*row.sequence, *row.draft]
            if chooser.sampling.greedy:
                row.draft += chooser.best(spread_1V, ids)
            else:
                q_V = chooser.probabilities(spread_1V, ids)[0]
                row.draft.append(draw(q_V, row.uniform()))
                row.drafted_from.append(q_V)
        return len(row.draft) < self._wanted

    def settle(self) -> float:
        """Forget rejected drafts, drop keys down to the budget, refresh the cache when it is due. Seconds of it."""
        start, row = time.perf_counter(), self.row
        self.rewind()
        self._settled += 1
        every, dropped = self.stepper.plan.refresh, self.stepper.physical < self.stepper.logical
        if every and dropped and self._settled % every == 0 and row.reason is None:
            self.stepper.clear()
            self.stepper.prefill(row.sequence[:-1])
        self.stepper.fit()
        return time.perf_counter() - start

    def rewind(self) -> None:
        """Forget rejected drafts."""
        self.stepper.rollback(max(0, self.stepper.logical - (len(self.row.prompt) + len(self.row.tokens) - 1)))


def unread(row: Row, stepper: Stepper) -> list[int]:
    """Tokens and drafts of a row that a model has not been fed."""
    return [*row.tokens, *row.draft][stepper.logical - len(row.prompt) :]


def look(verifier: Stepper) -> Oracle:
    """The oracle of a sequence: its verifier's attention, computed once for each state of the cache."""
    known: dict[int, Tensor] = {}

    def oracle() -> Tensor:
        if verifier.logical not in known:
            known.clear()
            known[verifier.logical] = verifier.attention_on_tokens()
        return known[verifier.logical]

    return oracle


@torch.inference_mode()
def near_tie(scores_V: Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """(difference of the two best scores, the same in rounding steps of the logits' `dtype`): how near a tie it was."""
    best, second = scores_V.topk(2).values.float().tolist()
    step = torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(max(abs(best), 1e-30)))
    return best - second, (best - second) / step
