"""Decoding of one or several sequences, by the verifier alone or with a drafter: propose, verify, accept, commit.

Invariant between rounds: the verifier has been fed every token but the last; the drafter never more.
"""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from bdcore.decoding.cascade import Cascade, CascadeProposer
from bdcore.decoding.draft_length import DraftRule
from bdcore.decoding.lookup import Lookup, LookupProposer
from bdcore.decoding.records import Decoded
from bdcore.decoding.sampling import GREEDY, Sampling
from bdcore.decoding.sequence import Proposer, Row
from bdcore.decoding.stops import StopStrings
from bdcore.models.drafter import Drafter
from bdcore.models.stepper import CachePlan, Stepper, feed_together

OnTokens = Callable[[list[int]], None]


@dataclass(frozen=True)
class Prefilled:
    """A verifier that has read a prompt, and the logits of what comes next. Reused by every method of a prompt."""

    stepper: Stepper
    prompt: list[int]
    logits_V: Tensor
    seconds: float
    queries: list[Tensor | None]
    """The verifier's newest queries per layer, where they are observed."""

    def rewind(self) -> None:
        """Back to the end of the prompt."""
        self.stepper.rollback(self.stepper.logical - len(self.prompt))
        for layer, queries in zip(self.stepper.cache.layers, self.queries, strict=True):
            layer.queries = queries


def prefill(
    verifier: Any, prompt: list[int], *, new_tokens: int, gamma: int, chunk: int, observe: int = 0
) -> Prefilled:
    """Read the prompt. The one prefill that every method shares, so first tokens agree bit for bit.

    `observe`: newest queries to remember, which the policy `oracle` needs.
    """
    start = time.perf_counter()
    block = gamma + 1
    plan = CachePlan(len(prompt) + new_tokens + block, block=block, prefill_chunk=chunk, observe=observe)
    stepper = Stepper(verifier, plan)
    logits_V = stepper.prefill(prompt)[0]
    queries = [layer.queries for layer in stepper.cache.layers]
    return Prefilled(stepper, prompt, logits_V, time.perf_counter() - start, queries)


def decode(
    prefilled: Prefilled,
    drafter: Drafter | Lookup | Cascade | None,
    plan: CachePlan | None = None,
    *,
    gamma: int | DraftRule = 0,
    new_tokens: int,
    eos: Collection[int],
    sampling: Sampling = GREEDY,
    seed: int = 0,
    stop: StopStrings | None = None,
    on_tokens: OnTokens | None = None,
) -> Decoded:
    """Generate exactly `new_tokens` tokens, or up to EOS or a stop string. Without a drafter (gamma 0) this is the
    verifier alone.

    Greedy output is the verifier's own, sampled output has its distribution. Leaves the verifier's cache at the prompt
    again, ready for the next method.
    """
    return decode_batch(
        [prefilled],
        drafter,
        plan,
        gamma=gamma,
        new_tokens=new_tokens,
        eos=eos,
        sampling=sampling,
        seeds=[seed],
        stop=stop,
        on_tokens=[on_tokens] if on_tokens else None,
    )[0]


def decode_batch(
    batch: Sequence[Prefilled],
    drafter: Drafter | Lookup | Cascade | None,
    plan: CachePlan | None = None,
    *,
    gamma: int | DraftRule = 0,
    new_tokens: int,
    eos: Collection[int],
    sampling: Sampling = GREEDY,
    seeds: Sequence[int] | None = None,
    stop: StopStrings | None = None,
    on_tokens: Sequence[OnTokens] | None = None,
) -> list[Decoded]:
    """Several prompts of any lengths together: each accepts its own number of tokens and ends when it is done.

    A row's tokens are those it gets alone. The seconds of a round are those of all rows in it.
    """
    assert len({id(start.stepper) for start in batch}) == len(batch), "each row needs a prefilled cache of its own"
    rule = gamma if isinstance(gamma, DraftRule) else DraftRule(gamma=gamma)
    rows = [
        Row(start.stepper, start.prompt, rule, new_tokens, eos, sampling, seed, stop)
        for start, seed in zip(batch, seeds if seeds is not None else range(len(batch)), strict=True)
    ]
    for row, start in zip(rows, batch, strict=True):
        row.begin(start.logits_V, start.seconds)
        if isinstance(drafter, Lookup):
            row.proposer = LookupProposer(drafter, row)
        elif isinstance(drafter, Cascade):
            assert plan is not None, "a cascade needs a cache plan"
            row.proposer = CascadeProposer(drafter, replace(plan, block=max(rule.gamma + 1, 2)), row, play_round)
        elif drafter is not None:
            assert plan is not None, "a drafter needs a cache plan"
            row.proposer = Proposer(drafter, replace(plan, block=max(rule.gamma + 1, 2)), row)
    _report(rows, on_tokens, [0] * len(rows))
    while live := [row for row in rows if row.reason is None]:
        before = [len(row.tokens) for row in rows]
        play_round(live)
        _report(rows, on_tokens, before)
    for start in batch:
        start.rewind()
    return [row.result() for row in rows]


def play_round(rows: Sequence[Row]) -> None:
    """One round of every row: propose, verify, accept, commit."""
    begun = time.perf_counter()
    propose(rows)
    proposed = time.perf_counter()
    logits = feed_together([row.verifier for row in rows], [row.unread() for row in rows])
    verdicts = [row.verdict(logits_TV[-len(row.draft) - 1 :]) for row, logits_TV in zip(rows, logits, strict=True)]
    checked = time.perf_counter()
    for row, (accepted, own) in zip(rows, verdicts, strict=True):
        row.commit(accepted, own)
    selected = sum(row.proposer.settle() for row in rows if row.proposer is not None)
    ended = time.perf_counter()
    draft_s, verify_s = proposed - begun, checked - proposed
    for row in rows:
        row.record(
            draft_s=draft_s,
            select_s=selected,
            verify_s=verify_s,
            overhead_s=max(0.0, ended - begun - draft_s - verify_s - selected),
        )


def propose(rows: Sequence[Row]) -> None:
    """Draft for every row, token by token, until each has what its rule wants."""
    drafting: list[Proposer] = []
    for row in rows:
        row.draft, row.drafted_from = [], []
        if isinstance(row.proposer, LookupProposer | CascadeProposer):
            row.proposer.draft()
        elif row.proposer is not None and row.proposer.start():
            drafting.append(row.proposer)
    while drafting:
        logits = feed_together([p.stepper for p in drafting], [p.unread() for p in drafting], last_only=True)
        drafting = [p for p, logits_1V in zip(drafting, logits, strict=True) if p.draw(logits_1V)]


def _report(rows: Sequence[Row], on_tokens: Sequence[OnTokens] | None, before: list[int]) -> None:
    for row, tell, seen in zip(rows, on_tokens or [], before, strict=bool(on_tokens)):
        if len(row.tokens) > seen:
            tell(row.tokens[seen:])


def first_mismatch(tokens: list[int], reference: list[int]) -> int | None:
    """Index of the first difference, lengths included; None when equal."""
    for i, (mine, theirs) in enumerate(zip(tokens, reference, strict=False)):
        if mine != theirs:
            return i
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference))


TIE_STEPS = 2.0


def mismatch_kind(gap_steps: float | None) -> str:
    """`tie` where the verifier's two best logits lay within two rounding steps, so that the order of sums decides;
    `bug` otherwise. `gap_steps` None: the lengths differ, which no rounding explains.
    """
    return "tie" if gap_steps is not None and gap_steps <= TIE_STEPS else "bug"
