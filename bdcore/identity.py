"""Keys, manifests and atomic writes: how an artifact is named, when it is done, and what a crash leaves behind.

A key is a hash of the stage's config, its input keys and the code of `bdcore`. A directory is complete when it holds
`manifest.json`, which is written last.
"""

import glob
import hashlib
import json
import os
import shutil
import time
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock
from pydantic import BaseModel

MANIFEST = "manifest.json"


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: the same text for equal values in every process."""
    if isinstance(value, BaseModel):
        value = value.model_dump(mode="json")
    return json.dumps(value, sort_keys=True, separators=(",", ":"), default=_jsonable)


def _jsonable(value: Any) -> Any:
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} has no canonical JSON form")


def digest(*parts: Any, length: int = 12) -> str:
    """Hex digest of the canonical JSON of `parts`."""
    return hashlib.blake2b(canonical_json(parts).encode(), digest_size=32).hexdigest()[:length]


def file_digest(path: Path) -> str:
    """Hex digest of a file's bytes."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


_NO_PART_OF = {
    "targets": ("training/", "evaluation/", "decoding/"),
    "base": ("evaluation/", "decoding/"),
    "training": ("evaluation/", "decoding/"),
    "evaluation": ("training/",),
}
"""Code of `bdcore` that a stage's output does not come from. Statistics and export make no rows and no weights."""
_NEVER = ("collapse/", "models/export.py")


@cache
def code_fingerprint(stage: str | None = None) -> str:
    """Hash of the source files of `bdcore` that a stage runs (None: of all): a change of method gives new keys."""
    root = Path(__file__).parent
    left_out = () if stage is None else (*_NEVER, *_NO_PART_OF.get(stage, ()))
    files = {p.relative_to(root).as_posix(): p for p in sorted(root.rglob("*.py"))}
    return digest([(name, file_digest(p)) for name, p in files.items() if not name.startswith(left_out)])


def stage_key(stage: str, config: Any, inputs: Mapping[str, str]) -> str:
    """Identity of a stage's output."""
    return digest(stage, config, dict(inputs), code_fingerprint(stage))


@contextmanager
def atomic_path(path: Path) -> Generator[Path]:
    """A temporary sibling of `path` that replaces it when the block ends without an error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def remove_partials(path: Path) -> None:
    """Remove what killed writers of `path` left behind. Only for who holds a lock that every writer of it holds.

    Process ids in the names tell nothing: they come again, in a container soon.
    """
    for partial in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        partial.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Pretty JSON, written atomically."""
    with atomic_path(path) as partial:
        partial.write_text(json.dumps(value, indent=2, sort_keys=True, default=_jsonable) + "\n")


def read_manifest(directory: Path) -> dict[str, Any] | None:
    """The manifest of a finished artifact whose files are all still there at their size; None otherwise."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        files = manifest["files"].items()
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # absent, damaged, or not a manifest
        return None
    for name, size in files:
        path = directory / name
        if not path.is_file() or path.stat().st_size != size:
            return None
    return manifest


def write_manifest(directory: Path, key: str, **facts: Any) -> dict[str, Any]:
    """Record every file of `directory` and `facts`; from here on the artifact counts as done."""
    files = {
        p.relative_to(directory).as_posix(): p.stat().st_size
        for p in sorted(directory.rglob("*"))
        if p.is_file() and p.name != MANIFEST and not p.name.endswith(".partial")
    }
    manifest = {"key": key, "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "files": files, **facts}
    write_json(directory / MANIFEST, manifest)
    return manifest


@contextmanager
def exclusive(directory: Path) -> Generator[None]:
    """Hold the artifact's lock, so that two processes never build the same one at once.

    The lock is the operating system's: a killed owner frees it.
    """
    directory.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(directory.with_name(f".{directory.name}.lock")):
        yield


@contextmanager
def staging(directory: Path) -> Generator[Path]:
    """A fresh sibling folder that replaces `directory` when the block ends without an error."""
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        shutil.rmtree(directory, ignore_errors=True)
        os.replace(partial, directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
