"""The tables: one explicit Arrow schema each, and the only way rows become Parquet.

Lengths in tokens, times in seconds, sizes in bytes; budget -1 is the full cache. Undefined is NULL, never NaN.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from bdcore.identity import atomic_path

FULL_BUDGET = -1
SELF = "self"
"""`drafter_name` where the verifier drafts for itself."""

_TOKENS = pa.list_(pa.int32())


def _required(name: str, kind: pa.DataType) -> pa.Field:
    return pa.field(name, kind, nullable=False)


TARGETS = pa.schema(
    [
        _required("doc_id", pa.string()),
        _required("source", pa.string()),
        _required("offset", pa.int64()),
        _required("prompt_ids", _TOKENS),
        _required("target_ids", _TOKENS),
        _required("mode", pa.string()),  # forced | generated
        _required("finish_reason", pa.string()),  # eos | length
        _required("topk_ids", pa.list_(_TOKENS)),
        _required("topk_logprobs", pa.list_(pa.list_(pa.float32()))),
        _required("truncated", pa.bool_()),
    ]
)

_CELL_FIELDS = [
    _required("run_key", pa.string()),
    _required("cell_key", pa.string()),
    _required("method", pa.string()),
    pa.field("drafter_key", pa.string()),  # NULL for `ar`, which has none
    pa.field("drafter_name", pa.string()),
    _required("workload", pa.string()),
    _required("corpus", pa.string()),
    _required("doc_id", pa.string()),
    _required("context", pa.int32()),
    _required("budget", pa.int32()),
    _required("policy", pa.string()),
    _required("position_mode", pa.string()),
    _required("gamma", pa.int32()),
    _required("gamma_mode", pa.string()),
    _required("refresh", pa.int32()),  # rounds between rebuilding a sparse cache; 0 never
    _required("temperature", pa.float32()),
    _required("seed", pa.int64()),
]

SAMPLES = pa.schema(
    [
        *_CELL_FIELDS,
        _required("prompt_len", pa.int32()),
        pa.field("evidence_distance", pa.int32()),  # needle: newest prompt tokens that hold the answer's evidence
        pa.field("new_tokens", pa.int32()),
        pa.field("finish_reason", pa.string()),
        pa.field("rounds", pa.int32()),
        pa.field("drafted", pa.int32()),
        pa.field("accepted", pa.int32()),
        pa.field("accepted_at", _TOKENS),  # [i] = rounds in which draft position i was accepted
        pa.field("drafted_at", _TOKENS),  # [i] = rounds in which draft position i was drafted
        pa.field("far_window", pa.int32()),  # replay: the verifier's newest tokens, which far-dependent ones look past
        pa.field("far_rounds", pa.int32()),  # rounds whose first token is far-dependent
        pa.field("far_accepted", pa.int32()),  # of these, with the first draft accepted
        pa.field("prefill_s", pa.float64()),
        pa.field("draft_prefill_s", pa.float64()),
        pa.field("draft_s", pa.float64()),
        pa.field("select_s", pa.float64()),
        pa.field("verify_s", pa.float64()),
        pa.field("overhead_s", pa.float64()),
        pa.field("ttft_s", pa.float64()),
        pa.field("decode_s", pa.float64()),
        pa.field("wall_s", pa.float64()),
        pa.field("ar_wall_s", pa.float64()),
        pa.field("ar_decode_s", pa.float64()),
        pa.field("drafter_kv_bytes_peak", pa.int64()),
        pa.field("verifier_kv_bytes_peak", pa.int64()),
        pa.field("drafter_cached_peak", pa.int32()),  # most keys cached per layer and head, block in flight included
        pa.field("output_text", pa.string()),
        pa.field("output_ids", _TOKENS),
        pa.field("accepted_spans", _TOKENS),  # characters of output_text from accepted drafts: start, end, start, ...
        pa.field("distinct_1", pa.float64()),
        pa.field("distinct_2", pa.float64()),
        pa.field("distinct_4", pa.float64()),
        pa.field("degenerate", pa.bool_()),
        pa.field("exact_match", pa.bool_()),
        pa.field("first_mismatch", pa.int32()),
        pa.field("mismatch_gap", pa.float64()),
        pa.field("mismatch_steps", pa.float64()),  # the gap in rounding steps of the verifier's dtype
        pa.field("mismatch_kind", pa.string()),  # tie (within 2 steps) | bug; NULL when equal
        _required("device", pa.string()),
        _required("dtype", pa.string()),
        _required("status", pa.string()),  # ok | failed
        pa.field("error", pa.string()),
    ]
)

ROUNDS = pa.schema(
    [
        _required("run_key", pa.string()),
        _required("cell_key", pa.string()),
        _required("doc_id", pa.string()),
        _required("method", pa.string()),
        _required("workload", pa.string()),
        _required("context", pa.int32()),
        _required("budget", pa.int32()),
        _required("gamma", pa.int32()),
        _required("round", pa.int32()),
        _required("drafted", pa.int32()),
        _required("accepted", pa.int32()),
        _required("emitted", pa.int32()),  # accepted + the verifier's own token, cut at EOS or the length limit
        pa.field("draft_s", pa.float64()),  # seconds and bytes are NULL in a replay, which is not timed
        pa.field("select_s", pa.float64()),
        pa.field("verify_s", pa.float64()),
        pa.field("overhead_s", pa.float64()),
        pa.field("drafter_cached", pa.int32()),
        pa.field("drafter_kv_bytes", pa.int64()),
        pa.field("verifier_kv_bytes", pa.int64()),
        pa.field("position", pa.int32()),  # replay: tokens of the document before the drafts
        pa.field("token_class", pa.string()),  # replay: of the verifier's token there
        pa.field("evidence", pa.int32()),  # replay: tokens back to where it last followed the same two; NULL: nowhere
        pa.field("far", pa.bool_()),  # replay: that token is far-dependent; NULL without far_window
    ]
)


def to_table(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows as an Arrow table of exactly `schema`; a missing, unknown, null or non-finite value is a ValueError.

    pyarrow would drop unknown keys and accept nulls in required fields without a word.
    """
    names = set(schema.names)
    for i, row in enumerate(rows):
        if set(row) != names:
            raise ValueError(f"row {i}: missing {sorted(names - set(row))}, unknown {sorted(set(row) - names)}")
        for field in schema:
            value = row[field.name]
            if value is None and not field.nullable:
                raise ValueError(f"row {i}: {field.name} is null; it is required")
            _check_value(f"row {i}: {field.name}", value, field.type)
    return pa.Table.from_pylist([dict(row) for row in rows], schema=schema)


def _check_value(where: str, value: Any, kind: pa.DataType) -> None:
    """Refuse what Arrow would store as something else: numbers that are not finite, fractions in whole numbers."""
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(f"{where} = {value}; write NULL for an undefined value")
        if pa.types.is_integer(kind) and not value.is_integer():
            raise ValueError(f"{where} = {value}; the column holds whole numbers")
    elif isinstance(value, list | tuple):
        for item in value:
            _check_value(where, item, kind.value_type)


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]], schema: pa.Schema, *, row_group_size: int = 1024) -> int:
    """Validate, then write one zstd Parquet file atomically. Returns the number of rows."""
    table = to_table(list(rows), schema)
    with atomic_path(path) as partial:
        # Lists of ids hardly repeat: a dictionary of them would only cost size and time.
        names: Any = [field.name for field in schema if pa.types.is_string(field.type)]
        pq.write_table(table, partial, compression="zstd", row_group_size=row_group_size, use_dictionary=names)
    return table.num_rows


def read_rows(path: Path, schema: pa.Schema) -> list[dict[str, Any]] | None:
    """The rows of one Parquet file, or None when it is unreadable or of another schema (so: rebuild it)."""
    try:
        table = pq.ParquetFile(path).read()
    except (OSError, pa.ArrowInvalid):
        return None
    return table.to_pylist() if table.schema.equals(schema) else None
