"""Greedy decoding of one sequence, alone or with a drafter: propose, verify, accept, commit.

Invariant between rounds: the verifier has been fed every token but the last; the drafter never more.
"""

import time
from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bdcore.decoding.accept import accept_greedy, commit
from bdcore.decoding.records import Decoded, Round
from bdcore.kv.budget import FULL
from bdcore.models.drafter import Drafter
from bdcore.models.stepper import CachePlan, Stepper

OnTokens = Callable[[list[int]], None]


@dataclass(frozen=True)
class Prefilled:
    """A verifier that has read a prompt, and its choice of the first token. Reused by every method of a prompt."""

    stepper: Stepper
    prompt: list[int]
    first: int
    gap: float
    """Between the two best logits of the first token."""
    seconds: float


def prefill(verifier: Any, prompt: list[int], *, new_tokens: int, gamma: int, chunk: int) -> Prefilled:
    """Read the prompt. The one prefill that every method shares, so first tokens agree bit for bit."""
    start = time.perf_counter()
    block = gamma + 1
    stepper = Stepper(verifier, CachePlan(len(prompt) + new_tokens + block, block=block, prefill_chunk=chunk))
    logits_V = stepper.prefill(prompt)[0]
    return Prefilled(stepper, prompt, int(logits_V.argmax()), top_gap(logits_V), time.perf_counter() - start)


def decode(
    prefilled: Prefilled,
    drafter: Drafter | None,
    plan: CachePlan | None = None,
    *,
    gamma: int = 0,
    new_tokens: int,
    eos: Container[int],
    on_tokens: OnTokens | None = None,
) -> Decoded:
    """Generate exactly `new_tokens` tokens, or up to EOS. Without a drafter (gamma 0) this is the verifier alone.

    Leaves the verifier's cache at the prompt again, ready for the next method.
    """
    verifier, prompt = prefilled.stepper, prefilled.prompt
    tokens, rounds, gaps = [prefilled.first], list[Round](), [prefilled.gap]
    accepted_at, drafted_at = [0] * gamma, [0] * gamma
    proposer = None
    clock = time.perf_counter()
    if drafter is not None:
        assert plan is not None, "a drafter needs a cache plan"
        proposer = _Proposer(drafter, replace(plan, block=max(gamma + 1, 2)), prompt)
    draft_prefill_s = time.perf_counter() - clock
    reason = "eos" if prefilled.first in eos else "length" if new_tokens == 1 else None
    if on_tokens:
        on_tokens(tokens)
    start = time.perf_counter()
    while reason is None:
        begun = time.perf_counter()
        remaining = new_tokens - len(tokens)
        draft = proposer.propose(tokens, min(gamma, remaining - 1)) if proposer else []
        proposed = time.perf_counter()
        logits_TV = verifier.feed([tokens[-1], *draft])[0]
        verified: list[int] = logits_TV.argmax(-1).tolist()
        checked = time.perf_counter()
        if proposer is None:
            gaps.append(top_gap(logits_TV[0]))
        accepted, own = accept_greedy(draft, verified)
        emitted, counted, reason = commit(draft, accepted, own, eos=eos, remaining=remaining)
        drafted = counted if len(emitted) <= accepted else len(draft)
        tokens += emitted
        verifier.rollback(verifier.logical - (len(prompt) + len(tokens) - 1))
        select_s = proposer.settle(tokens) if proposer else 0.0
        for i in range(drafted):
            drafted_at[i] += 1
            accepted_at[i] += i < counted
        if on_tokens:
            on_tokens(emitted)
        draft_s, verify_s = proposed - begun, checked - proposed
        total = time.perf_counter() - begun
        rounds.append(
            Round(
                drafted=drafted,
                accepted=counted,
                emitted=len(emitted),
                draft_s=draft_s,
                select_s=select_s,
                verify_s=verify_s,
                overhead_s=max(0.0, total - draft_s - verify_s - select_s),
                drafter_cached=proposer.stepper.physical if proposer else 0,
                drafter_kv_bytes=proposer.stepper.cache.bytes() if proposer else 0,
                verifier_kv_bytes=verifier.cache.bytes(),
            )
        )
    decode_s = time.perf_counter() - start
    verifier.rollback(verifier.logical - len(prompt))
    return Decoded(
        tokens,
        reason,
        rounds,
        prefilled.seconds,
        draft_prefill_s,
        decode_s,
        drafter_cached_peak=proposer.stepper.cache.peak_physical if proposer else 0,
        drafter_kv_bytes=proposer.stepper.cache.bytes() if proposer else 0,
        verifier_kv_bytes=verifier.cache.bytes(),
        accepted_at=accepted_at,
        drafted_at=drafted_at,
        gaps=gaps if proposer is None else [],
    )


class _Proposer:
    """A drafter and its cache along one sequence."""

    def __init__(self, drafter: Drafter, plan: CachePlan, prompt: list[int]) -> None:
        self.drafter, self.prompt = drafter, prompt
        self.stepper = Stepper(drafter.model, plan)
        self.stepper.prefill(prompt)
        self.stepper.fit()

    def propose(self, tokens: list[int], count: int) -> list[int]:
        """`count` tokens after prompt + tokens, one by one, after feeding what the drafter has not seen."""
        if count == 0:
            return []
        pending = tokens[self.stepper.logical - len(self.prompt) :]
        draft: list[int] = []
        while len(draft) < count:
            logits_TV = self.stepper.feed(pending)[0]
            pending = [int(self.drafter.to_ids(logits_TV[-1].argmax(-1)))]
            draft += pending
        return draft

    def settle(self, tokens: list[int]) -> float:
        """Forget rejected drafts, drop keys down to the budget. Seconds of selection."""
        before = self.stepper.select_s
        self.stepper.rollback(max(0, self.stepper.logical - (len(self.prompt) + len(tokens) - 1)))
        self.stepper.fit()
        return self.stepper.select_s - before


def sparse_plan(plan: CachePlan, *, prompt_len: int, new_tokens: int, gamma: int) -> CachePlan:
    """The plan with a buffer for this prompt: a full cache grows with the sequence, a sparse one does not."""
    return replace(plan, capacity=prompt_len + new_tokens + gamma + 1) if plan.budget == FULL else plan


def first_mismatch(tokens: list[int], reference: list[int]) -> int | None:
    """Index of the first difference, lengths included; None when equal."""
    for i, (mine, theirs) in enumerate(zip(tokens, reference, strict=False)):
        if mine != theirs:
            return i
    return None if len(tokens) == len(reference) else min(len(tokens), len(reference))


@torch.inference_mode()
def top_gap(logits_V: Tensor) -> float:
    """Difference of the two largest logits: how near a tie the verifier was."""
    best = logits_V.float().topk(2).values
    return float(best[0] - best[1])
