"""Target rows on disk: making them from greedy tokens, reading a finished set. Needs no decoder and no model."""

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from bdcore.documents import Prompt
from bdcore.targets.generate import Greedy


def row(prompt: Prompt, greedy: Greedy, mode: str) -> dict[str, Any]:
    """One row of the `targets` table."""
    return {
        "doc_id": prompt.doc_id,
        "source": prompt.source,
        "offset": prompt.offset,
        "prompt_ids": prompt.ids,
        "target_ids": greedy.ids,
        "mode": mode,
        "finish_reason": greedy.finish_reason,
        "topk_ids": greedy.topk_ids,
        "topk_logprobs": greedy.topk_logprobs,
        "truncated": prompt.truncated,
    }


def read_targets(directory: Path) -> list[dict[str, Any]]:
    """Every row of a finished target set, in shard order."""
    return [row for path in sorted(directory.glob("part-*.parquet")) for row in pq.ParquetFile(path).read().to_pylist()]


def document_ids(directory: Path) -> set[str]:
    """The documents a target set was made from."""
    paths = sorted(directory.glob("part-*.parquet"))
    return {doc for path in paths for doc in pq.ParquetFile(path).read(["doc_id"]).column(0).to_pylist()}
