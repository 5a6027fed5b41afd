"""Target rows on disk: making them from greedy tokens, reading a finished set a row at a time. Needs no model.

Legend: P prompt tokens, T target tokens, K top-k.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from bdcore.documents import Prompt
from bdcore.targets.generate import Greedy
from bdcore.targets.shards import document_ids, id_counts, list_lengths, readable, shard_paths

__all__ = ["TargetRow", "TargetRows", "document_ids", "id_counts", "row"]

CACHE_BYTES = 256 << 20
_READ = ["doc_id", "mode", "finish_reason", "prompt_ids", "target_ids", "topk_ids", "topk_logprobs"]

Ids = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class TargetRow:
    """One sequence with the verifier's greedy ids. Its arrays are cached: write to copies only."""

    doc_id: str
    mode: str  # forced | generated
    finish_reason: str  # eos | length
    prompt_ids: Ids
    """(P,)"""
    target_ids: Ids
    """(T,): after every prompt token (forced, T = P), or the continuation of the prompt (generated)."""
    topk_ids: Ids
    """(T, K)"""
    topk_logprobs: NDArray[np.float32]
    """(T, K)"""

    @property
    def length(self) -> int:
        """Tokens of the training sequence. The last token of a continuation is none of them: it is a label alone."""
        return _length(self.mode, len(self.prompt_ids), len(self.target_ids))

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in (self.prompt_ids, self.target_ids, self.topk_ids, self.topk_logprobs))


class TargetRows(Sequence[TargetRow]):
    """The rows of a finished target set in shard order, read when asked for.

    The row groups used last stay in memory, `cache_bytes` of them; one larger than that stays until the next is read.
    Raises DamagedShard where a shard cannot be read.
    """

    def __init__(self, directory: Path, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._start(cache_bytes)
        for path in shard_paths(directory):
            with readable(path), pq.ParquetFile(path) as file:
                sizes = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
                self._describe(file.read(["doc_id", "mode", "prompt_ids", "target_ids"]))
            for group, size in enumerate(sizes):
                self._add(partial(_read_group, path, group), size)

    @classmethod
    def of(cls, rows: Iterable[Mapping[str, Any]]) -> "TargetRows":
        """The same over rows in memory, which need the fields of `TargetRow` alone."""
        out, made = cls.__new__(cls), [_from_mapping(row) for row in rows]
        out._start(CACHE_BYTES)
        out._add(lambda: made, len(made))
        out.doc_ids, out.modes = [r.doc_id for r in made], [r.mode for r in made]
        out.lengths = [r.length for r in made]
        return out

    def _start(self, cache_bytes: int) -> None:
        self.doc_ids: list[str] = []
        self.modes: list[str] = []
        self.lengths: list[int] = []
        """`TargetRow.length` of each row, known without reading it."""
        self._groups: list[Callable[[], list[TargetRow]]] = []
        self._places: list[tuple[int, int]] = []  # (group, row in it)
        self._cache: OrderedDict[int, list[TargetRow]] = OrderedDict()
        self._cache_bytes, self._cached = cache_bytes, 0

    def _add(self, read: Callable[[], list[TargetRow]], rows: int) -> None:
        self._places += [(len(self._groups), i) for i in range(rows)]
        self._groups.append(read)

    def _describe(self, table: pa.Table) -> None:
        modes = table["mode"].to_pylist()
        sizes = [list_lengths(table[name]) for name in ("prompt_ids", "target_ids")]
        self.doc_ids += table["doc_id"].to_pylist()
        self.modes += modes
        self.lengths += map(_length, modes, *sizes)

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> TargetRow: ...
    @overload
    def __getitem__(self, index: slice) -> list[TargetRow]: ...
    def __getitem__(self, index: int | slice) -> TargetRow | list[TargetRow]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        group, row = self._places[index]
        return self._group(group)[row]

    def _group(self, index: int) -> list[TargetRow]:
        if index in self._cache:
            self._cache.move_to_end(index)
            return self._cache[index]
        rows = self._cache[index] = self._groups[index]()
        self._cached += _nbytes(rows)
        while self._cached > self._cache_bytes and len(self._cache) > 1:
            self._cached -= _nbytes(self._cache.popitem(last=False)[1])
        return rows


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


def _length(mode: str, prompt: int, target: int) -> int:
    return prompt if mode == "forced" else prompt + target - 1


def _nbytes(rows: list[TargetRow]) -> int:
    return sum(row.nbytes for row in rows)


def _read_group(path: Path, group: int) -> list[TargetRow]:
    with readable(path), pq.ParquetFile(path) as file:
        table = file.read_row_group(group, _READ)
    return [_from_table(table, i) for i in range(table.num_rows)]


def _from_table(table: pa.Table, i: int) -> TargetRow:
    doc_id, mode, reason = (table[name][i].as_py() for name in _READ[:3])
    prompt, target, top_ids, top_logprobs = (table[name][i].values for name in _READ[3:])
    shape = len(target), -1
    return TargetRow(
        doc_id,
        mode,
        reason,
        _numbers(prompt),
        _numbers(target),
        _numbers(top_ids.flatten()).reshape(shape),
        _numbers(top_logprobs.flatten()).reshape(shape),
    )


def _numbers(values: pa.Array) -> NDArray[Any]:
    # A copy: Arrow's own buffer cannot be written to, which torch warns of, and would keep the whole row group.
    return np.array(values.to_numpy())


def _from_mapping(row: Mapping[str, Any]) -> TargetRow:
    return TargetRow(
        row["doc_id"],
        row["mode"],
        row["finish_reason"],
        np.array(row["prompt_ids"], np.int32),
        np.array(row["target_ids"], np.int32),
        np.array(row["topk_ids"], np.int32),
        np.array(row["topk_logprobs"], np.float32),
    )
