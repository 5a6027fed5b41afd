"""The rows that a measurement leaves: one per cell and prompt, one per verify round, one that says why it failed."""

import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from bdcore.config import Config
from bdcore.decoding.decoder import first_mismatch, mismatch_kind
from bdcore.decoding.records import Decoded
from bdcore.documents import Prompt
from bdcore.evaluation.degeneracy import distinct_n, is_degenerate
from bdcore.evaluation.grid import GREEDY, Cell
from bdcore.models.drafter import Drafter
from bdcore.schema import ROUNDS, SAMPLES

Row = dict[str, Any]


@dataclass(frozen=True)
class Bench:
    """What a grid measures with: loaded models and the names its rows carry."""

    run_key: str
    config: Config
    verifier: Any
    tokenizer: Any
    drafters: Mapping[str, Drafter]
    """By name: `base`, `trained`, `self` (the verifier), and those of `grid.drafters`."""
    drafter_keys: Mapping[str, str]
    eos: Collection[int]
    device: str
    dtype: str


def identity(bench: Bench, prompt: Prompt, cell: Cell) -> Row:
    """What every sample row says of its cell and prompt; measures are NULL."""
    role = cell.drafter
    return {
        **dict.fromkeys(SAMPLES.names),
        "run_key": bench.run_key,
        "cell_key": cell.key,
        "method": cell.method,
        "drafter_key": bench.drafter_keys[role] if role else None,
        "drafter_name": role,
        "workload": cell.workload,
        "corpus": prompt.source,
        "doc_id": prompt.doc_id,
        "context": cell.context,
        "budget": cell.budget,
        "policy": cell.policy,
        "position_mode": cell.position_mode,
        "gamma": cell.gamma,
        "gamma_mode": cell.gamma_mode,
        "refresh": cell.refresh,
        "temperature": cell.temperature,
        "seed": bench.config.seed,
        "prompt_len": cell.context,
        "evidence_distance": prompt.evidence_distance,
        "device": bench.device,
        "dtype": bench.dtype,
    }


def decoded_row(bench: Bench, prompt: Prompt, cell: Cell, decoded: Decoded, alone: Decoded, *, decode_s: float) -> Row:
    """A continuation beside the verifier's own. `decode_s`: seconds the verifier `alone` took around it.

    Two draws from one distribution need not be equal: only greedy text is compared.
    """
    greedy = cell.workload == GREEDY
    mismatch = _mismatch(decoded, alone) if greedy else None
    phases = {
        name: sum(getattr(r, name) for r in decoded.rounds)
        for name in ("draft_s", "select_s", "verify_s", "overhead_s")
    }
    return {
        **identity(bench, prompt, cell),
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
        "ar_wall_s": alone.prefill_s + decode_s,
        "ar_decode_s": decode_s,
        "drafter_kv_bytes_peak": decoded.drafter_kv_bytes,
        "verifier_kv_bytes_peak": decoded.verifier_kv_bytes,
        "drafter_cached_peak": decoded.drafter_cached_peak,
        "output_text": bench.tokenizer.decode(decoded.tokens),
        "output_ids": decoded.tokens,
        "accepted_spans": accepted_spans(bench.tokenizer, decoded),
        "distinct_1": distinct_n(decoded.tokens, 1),
        "distinct_2": distinct_n(decoded.tokens, 2),
        "distinct_4": distinct_n(decoded.tokens, 4),
        "degenerate": is_degenerate(decoded.tokens),
        "exact_match": mismatch is None if greedy else None,
        "first_mismatch": mismatch,
        "mismatch_gap": _at(alone.gaps, mismatch),
        "mismatch_steps": _at(alone.gap_steps, mismatch),
        "mismatch_kind": mismatch_kind(_at(alone.gap_steps, mismatch)) if mismatch is not None else None,
        "status": "ok",
    }


def accepted_spans(tokenizer: Any, decoded: Decoded) -> list[int]:
    """Start and end, in characters of the text, of every run of accepted drafts; the first token is the verifier's."""
    drafted = [False] + [i < r.accepted for r in decoded.rounds for i in range(r.emitted)]
    spans: list[int] = []
    for accepted, run in groupby(enumerate(drafted[: len(decoded.tokens)]), key=lambda pair: pair[1]):
        places = [i for i, _ in run]
        if accepted:
            # By the text of the tokens before: a character may be split over several tokens.
            spans += [len(tokenizer.decode(decoded.tokens[:end])) for end in (places[0], places[-1] + 1)]
    return spans


def _mismatch(decoded: Decoded, alone: Decoded) -> int | None:
    """The first token that differs; after the last one where only the reason to stop does."""
    mismatch = first_mismatch(decoded.tokens, alone.tokens)
    return len(alone.tokens) if mismatch is None and decoded.finish_reason != alone.finish_reason else mismatch


def _at(values: list[float], index: int | None) -> float | None:
    return values[index] if index is not None and index < len(values) else None


def failed_row(bench: Bench, prompt: Prompt, cell: Cell, error: Exception) -> Row:
    """A cell that raised."""
    where = traceback.extract_tb(error.__traceback__)[-1]
    reason = f"{type(error).__name__}: {error} ({where.name}, line {where.lineno})"
    return {**identity(bench, prompt, cell), "status": "failed", "error": " ".join(reason.split())}


def round_row(bench: Bench, prompt: Prompt, cell: Cell, index: int, measures: Mapping[str, Any]) -> Row:
    """One verify round; what was not measured is NULL."""
    return {
        **dict.fromkeys(ROUNDS.names),
        "run_key": bench.run_key,
        "cell_key": cell.key,
        "doc_id": prompt.doc_id,
        "method": cell.method,
        "workload": cell.workload,
        "context": cell.context,
        "budget": cell.budget,
        "gamma": cell.gamma,
        "round": index,
        **measures,
    }
