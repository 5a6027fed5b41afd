"""One prompt measured under every cell of its context: `ar` first, then each method against it, as table rows.

The prompt is read once by the verifier; every method starts from that cache. A cell that fails is a row that says so.
"""

import traceback
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from bdcore.config import Config
from bdcore.decoding.decoder import Prefilled, decode, first_mismatch, mismatch_kind, prefill
from bdcore.decoding.draft_length import DraftRule
from bdcore.decoding.records import Decoded, Round
from bdcore.documents import Prompt
from bdcore.evaluation.degeneracy import distinct_n, is_degenerate
from bdcore.evaluation.grid import Cell
from bdcore.models.drafter import Drafter
from bdcore.models.stepper import CachePlan
from bdcore.runtime import seed_for
from bdcore.schema import SAMPLES

Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """What a grid measures with: loaded models and the names its rows carry."""

    run_key: str
    config: Config
    verifier: Any
    tokenizer: Any
    drafters: Mapping[str, Drafter]
    """By role: `base`, `trained`."""
    drafter_keys: Mapping[str, str]
    eos: Collection[int]
    device: str
    dtype: str


def measure_prompt(
    bench: Bench, prompt: Prompt, cells: list[Cell], *, on_cell: Callable[[Cell], None] | None = None
) -> tuple[list[Row], list[Row]]:
    """(sample rows, round rows) of one prompt under the cells of one context, the first of which is `ar`."""
    grid = bench.config.grid
    assert cells[0].method == "ar", "ar comes first: the others are measured against it"
    samples, rounds = list[Row](), list[Row]()
    start, alone = None, None
    for cell in cells:
        try:
            if start is None:
                most = max(cell.gamma for cell in cells)
                start = prefill(
                    bench.verifier,
                    prompt.ids,
                    new_tokens=grid.new_tokens,
                    gamma=most,
                    chunk=grid.prefill_chunk,
                    observe=grid.window if any(cell.policy == "oracle" for cell in cells) else 0,
                )
            decoded = _decode(bench, start, cell)
            alone = decoded if cell.method == "ar" else alone
            if alone is None:
                raise RuntimeError("`ar` failed on this prompt; nothing to compare with")
            samples.append(_sample(bench, prompt, cell, decoded, alone))
            rounds += [_round(bench, prompt, cell, i, r) for i, r in enumerate(decoded.rounds)]
        except Exception as error:  # one failed cell must not stop the grid; the row carries the reason
            samples.append(_failed(bench, prompt, cell, error))
            start = None  # its caches may be in any state
        if on_cell:
            on_cell(cell)
    return samples, rounds


def cache_plan(config: Config, *, budget: int, position_mode: str) -> CachePlan:
    """How a study keeps its drafter's cache at a budget, in the grid and for a single prompt."""
    return CachePlan(
        capacity=0,
        budget=budget,
        selection=config.grid.selection(seed_for(config.seed, "policy")),
        position_mode=position_mode,
        prefill_chunk=config.grid.prefill_chunk,
        extrapolate=config.drafter.beyond_positions == "extrapolate",
        refresh=config.grid.refresh,
    )


def _decode(bench: Bench, start: Prefilled, cell: Cell) -> Decoded:
    new_tokens = bench.config.grid.new_tokens
    if cell.drafter is None:
        return decode(start, None, new_tokens=new_tokens, eos=bench.eos)
    plan = cache_plan(bench.config, budget=cell.budget, position_mode=cell.position_mode)
    rule = DraftRule(cell.gamma_mode, cell.gamma, bench.config.grid.confidence)
    return decode(start, bench.drafters[cell.drafter], plan, gamma=rule, new_tokens=new_tokens, eos=bench.eos)


def _identity(bench: Bench, prompt: Prompt, cell: Cell) -> Row:
    role = cell.drafter
    return {
        **dict.fromkeys(SAMPLES.names),
        "run_key": bench.run_key,
        "cell_key": cell.key,
        "method": cell.method,
        "drafter_key": bench.drafter_keys[role] if role else None,
        "drafter_name": role,
        "workload": "greedy",
        "corpus": bench.config.grid.corpus.source,
        "doc_id": prompt.doc_id,
        "context": cell.context,
        "budget": cell.budget,
        "policy": cell.policy,
        "position_mode": cell.position_mode,
        "gamma": cell.gamma,
        "gamma_mode": cell.gamma_mode,
        "refresh": cell.refresh,
        "temperature": 0.0,
        "seed": bench.config.seed,
        "prompt_len": len(prompt.ids),
        "device": bench.device,
        "dtype": bench.dtype,
    }


def _sample(bench: Bench, prompt: Prompt, cell: Cell, decoded: Decoded, alone: Decoded) -> Row:
    mismatch = first_mismatch(decoded.tokens, alone.tokens)
    if mismatch is None and decoded.finish_reason != alone.finish_reason:
        mismatch = len(alone.tokens)
    phases = {
        name: sum(getattr(r, name) for r in decoded.rounds)
        for name in ("draft_s", "select_s", "verify_s", "overhead_s")
    }
    return {
        **_identity(bench, prompt, cell),
        **phases,
        "new_tokens": len(decoded.tokens),
        "finish_reason": decoded.finish_reason,
        "rounds": len(decoded.rounds),
        "drafted": sum(r.drafted for r in decoded.rounds),
        "accepted": sum(r.accepted for r in decoded.rounds),
        "accepted_at": decoded.accepted_at,
        "drafted_at": decoded.drafted_at,
        "prefill_s": decoded.prefill_s,
        "draft_prefill_s": decoded.draft_prefill_s,
        "ttft_s": decoded.ttft_s,
        "decode_s": decoded.decode_s,
        "wall_s": decoded.wall_s,
        "ar_wall_s": alone.wall_s,
        "ar_decode_s": alone.decode_s,
        "drafter_kv_bytes_peak": decoded.drafter_kv_bytes,
        "verifier_kv_bytes_peak": decoded.verifier_kv_bytes,
        "drafter_cached_peak": decoded.drafter_cached_peak,
        "output_text": bench.tokenizer.decode(decoded.tokens),
        "output_ids": decoded.tokens,
        "distinct_1": distinct_n(decoded.tokens, 1),
        "distinct_2": distinct_n(decoded.tokens, 2),
        "distinct_4": distinct_n(decoded.tokens, 4),
        "degenerate": is_degenerate(decoded.tokens),
        "exact_match": mismatch is None,
        "first_mismatch": mismatch,
        "mismatch_gap": _at(alone.gaps, mismatch),
        "mismatch_steps": _at(alone.gap_steps, mismatch),
        "mismatch_kind": mismatch_kind(_at(alone.gap_steps, mismatch)) if mismatch is not None else None,
        "status": "ok",
    }


def _at(values: list[float], index: int | None) -> float | None:
    return values[index] if index is not None and index < len(values) else None


def _failed(bench: Bench, prompt: Prompt, cell: Cell, error: Exception) -> Row:
    where = traceback.extract_tb(error.__traceback__)[-1]
    reason = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
    return {**_identity(bench, prompt, cell), "status": "failed", "error": " ".join(reason.split())}


def _round(bench: Bench, prompt: Prompt, cell: Cell, index: int, record: Round) -> Row:
    return {
        "run_key": bench.run_key,
        "cell_key": cell.key,
        "doc_id": prompt.doc_id,
        "method": cell.method,
        "context": cell.context,
        "budget": cell.budget,
        "gamma": cell.gamma,
        "round": index,
        **vars(record),
    }
