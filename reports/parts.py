"""The Parquet files of a workspace: which there are now, and which are damaged. Reads their ends, never their rows."""

import glob
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

# `[!.]`: a folder or file that is still being written has a name with a leading dot.
GLOBS = {
    "targets": "targets/[!.]*/part-*.parquet",
    "rounds": "results/rounds/run_key=*/[!.]*.parquet",
    "samples": "results/samples/run_key=*/[!.]*.parquet",
}
_RUN = "run_key=*"
_MAGIC = b"PAR1"
_LEAST = 12
"""Bytes of a Parquet file: the magic number at both ends, and the length of its footer."""


@dataclass(frozen=True)
class Parts:
    """What was found at one moment. Files come and go while a grid is running: reading one may fail all the same."""

    root: Path
    run_key: str | None
    files: Mapping[str, Sequence[Path]]
    """Table -> files that look whole, by name; no entry for a table without any."""
    skipped: Mapping[Path, str]
    """Damaged file -> what is wrong with it."""
    damaged: frozenset[str]
    """Tables that damaged files belong to."""

    @property
    def sources(self) -> dict[str, list[str]]:
        """What to read, by table: one glob, which costs DuckDB a hundredth of a list, or the list where it must."""
        return {
            name: [path.as_posix() for path in paths]
            if name in self.damaged
            else [absolute_glob(self.root, name, self.run_key)]
            for name, paths in self.files.items()
        }

    def named_in(self, message: str) -> Path | None:
        """The file below the workspace that an error message is about."""
        found = re.search(re.escape(self.root.as_posix()) + r"/(?:targets|results)/[^\"']+?\.parquet", message)
        return Path(found[0]) if found else None

    def label(self, path: Path) -> str:
        return path.relative_to(self.root).as_posix()


def find(workspace: Path, run_key: str | None = None, left_out: Mapping[Path, str] | None = None) -> Parts:
    """The files of a workspace, or of one run's results; `left_out` are known to be damaged (file -> reason)."""
    root = workspace.expanduser().resolve()
    files: dict[str, list[Path]] = {}
    skipped: dict[Path, str] = {}
    damaged: set[str] = set()
    for name in GLOBS if run_key is None else (name for name, pattern in GLOBS.items() if _RUN in pattern):
        for path in sorted(root.glob(_pattern(name, run_key))):
            reason = (left_out or {}).get(path) or fault(path)
            if not reason:
                files.setdefault(name, []).append(path)
            elif path.exists():  # else it was removed since it was listed
                skipped[path] = reason
                damaged.add(name)
    return Parts(root, run_key, files, skipped, frozenset(damaged))


def _pattern(name: str, run_key: str | None) -> str:
    return GLOBS[name] if run_key is None else GLOBS[name].replace(_RUN, f"run_key={glob.escape(run_key)}")


def absolute_glob(root: Path, name: str, run_key: str | None = None) -> str:
    """Where a table's files lie; a `[` in the workspace's own name means itself."""
    return f"{glob.escape(root.as_posix())}/{_pattern(name, run_key)}"


def fault(path: Path) -> str | None:
    """Why a file cannot be Parquet, by its size and its ends; None where it may be."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            if size < _LEAST:
                return f"{size} bytes"
            ends = [os.pread(file.fileno(), len(_MAGIC), offset) for offset in (0, size - len(_MAGIC))]
    except OSError as error:
        return error.strerror
    return None if ends == [_MAGIC, _MAGIC] else "cut off, or no Parquet file"


def runs(workspace: Path) -> list[str]:
    """Keys of the runs that have sample files."""
    return sorted({path.parent.name.removeprefix("run_key=") for path in workspace.glob(GLOBS["samples"])})
