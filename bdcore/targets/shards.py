"""The Parquet shards of a target set, a column at a time: what they hold and whether they are whole."""

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from torch import Tensor

from bdcore.schema import TARGETS


class DamagedShard(RuntimeError):
    """A shard that cannot be read, with its path and what to do."""


@contextmanager
def readable(path: Path) -> Generator[None]:
    """Reads of a shard; raises DamagedShard where it is not what was written."""
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        raise DamagedShard(
            f"{path}: a damaged target shard ({' '.join(str(error).split())[:200]}); run the same command again, which "
            "makes it anew"
        ) from error


def shard_paths(directory: Path) -> list[Path]:
    """The shards of a set in their order."""
    return sorted(directory.glob("part-*.parquet"))


def shard_facts(path: Path) -> tuple[list[str], int] | None:
    """(documents, target tokens) of one shard; None when it is unreadable or of another schema (so: make it again)."""
    try:
        table = _read(path)
    except DamagedShard:
        return None
    if not table.schema.equals(TARGETS):
        return None
    return table["doc_id"].to_pylist(), sum(list_lengths(table["target_ids"]))


def document_ids(directory: Path) -> set[str]:
    """The documents a target set was made from."""
    return {doc for path in shard_paths(directory) for doc in _read(path, ["doc_id"])["doc_id"].to_pylist()}


def id_counts(directory: Path, vocab_size: int) -> Tensor:
    """How often each id is a greedy token of the set: (vocab_size,) int64. ValueError for an id outside."""
    counts = np.zeros(vocab_size, np.int64)
    for path in shard_paths(directory):
        ids = _read(path, ["target_ids"])["target_ids"].combine_chunks().flatten().to_numpy()
        if ids.size and not 0 <= ids.min() <= ids.max() < vocab_size:
            raise ValueError(f"{path}: target ids from {ids.min()} to {ids.max()} in a vocabulary of {vocab_size}")
        counts += np.bincount(ids, minlength=vocab_size)
    return torch.from_numpy(counts)


def list_lengths(column: pa.ChunkedArray) -> list[int]:
    """Items of each list of a column."""
    return np.diff(column.combine_chunks().offsets.to_numpy()).tolist()


def _read(path: Path, columns: list[str] | None = None) -> pa.Table:
    with readable(path), pq.ParquetFile(path) as file:
        return file.read(columns)
