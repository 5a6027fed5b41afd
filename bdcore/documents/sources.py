"""Where long text comes from: source files, local tables and named hub data sets become documents with stable names.

It does not tokenise, cut or sample; `prompts` does. Nothing is written, and only the hub needs a network.
"""

import hashlib
import logging
import os
import re
import sysconfig
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path

from bdcore.config import ConfigError, CorpusConfig
from bdcore.documents.document import Document, absolute, brief, hashed_split, where
from bdcore.documents.needle import hidden
from bdcore.documents.tables import TABLES, check_table, read_table, table_files
from bdcore.identity import canonical_json, digest

_PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc")
_CODE = (".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".sh")
TEXT_SUFFIXES = (*_PROSE, *_CODE)
# Tests, demos and bundled data of the standard library: either not written to be read, or not installed everywhere.
_STDLIB_LEFT_OUT = {
    *("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"),
    *("idlelib", "lib2to3", "turtledemo", "ensurepip", "_bundled", "pydoc_data"),
}
_FOLDER_LEFT_OUT = {"__pycache__", "node_modules"}
_log = logging.getLogger(__name__)


def check_corpus(corpus: CorpusConfig) -> None:
    """Raise ConfigError for every fault that can be known without reading texts or asking the hub."""
    if corpus.source == "needle":
        with _filler_errors():
            check_corpus(corpus.texts)
        return
    if corpus.path is None:
        if corpus.source in ("folder", "file"):
            wanted = "a folder of text files" if corpus.source == "folder" else "a .parquet or .jsonl file"
            raise ConfigError(f"corpus.path is not set: source `{corpus.source}` needs {wanted}")
        return
    path = absolute(corpus.path)
    if corpus.source == "stdlib":
        raise ConfigError(f"corpus.path = {path}: source `stdlib` takes none; remove it or choose `folder`")
    if not path.exists():
        raise ConfigError(f"corpus.path = {path}: no such file or folder; correct it")
    with _one_line_errors(f"corpus.path = {path}"):
        if corpus.source == "folder":
            _check_folder(path)
        else:
            for file in table_files(corpus, path)[0]:
                check_table(file, TABLES[corpus.source])


def load_documents(corpus: CorpusConfig) -> list[Document]:
    """The documents of `corpus.split`, in a mixed order that is the same on every run."""
    if corpus.source == "needle":
        with _filler_errors():
            return hidden(load_documents(corpus.texts), corpus)
    check_corpus(corpus)
    found: Counter[str] = Counter()
    seen: set[str] = set()
    documents: list[Document] = []
    with _one_line_errors(where(corpus)):
        for split, document in _read(corpus):
            if document.doc_id in seen:
                raise ConfigError(f"{where(corpus)}: two documents are named {document.doc_id!r}; give each its own")
            seen.add(document.doc_id)
            found[split] += 1
            if split == corpus.split:
                documents.append(replace(document, chat=corpus.chat, frame=corpus.frame, corpus=corpus.name))
    if not documents:
        have = ", ".join(f"{count} in `{split}`" for split, count in sorted(found.items())) or "none at all"
        raise ConfigError(
            f"corpus.split = {corpus.split}: no documents of this split in {where(corpus)} (found {have}); "
            "use the other split or a larger corpus"
        )
    return sorted(documents, key=lambda document: (digest("order", document.doc_id), document.doc_id))


def documents_key(documents: Iterable[Document]) -> str:
    """Identity of documents by name and content, whatever their order."""
    return digest(sorted(_identity(d) for d in documents))


def _identity(document: Document) -> list[str]:
    """What a document is, in as many parts as it has: later kinds of it leave the keys of the earlier ones alone."""
    plain = [document.doc_id, document.source, _text_hash(document.text), document.question or ""]
    asked = document.question is not None
    chat = [document.chat] if asked and document.chat != "never" else []
    frame = [document.frame] if asked and document.frame != "benchmark" else []
    return plain + chat + frame + [canonical_json(astuple(needle)) for needle in document.needles]


def corpus_key(corpus: CorpusConfig) -> str:
    """Identity of the content that `corpus` reads now: an edited file under the same path gives another key."""
    return documents_key(load_documents(corpus))


def _text_hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@contextmanager
def _one_line_errors(where: str) -> Generator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # unreadable, not UTF-8, not JSON, not Parquet
        raise ConfigError(f"{where}: {brief(error)}; replace or repair the file") from error


@contextmanager
def _filler_errors() -> Generator[None]:
    """Errors of a needle's filler, under the name that the configuration has for it."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(re.sub(r"\bsource(?= [`=])", "filler", str(error))) from error


def _read(corpus: CorpusConfig) -> Iterator[tuple[str, Document]]:
    """(split, document) of everything the corpus holds, as far as its splits can be told apart while reading."""
    if corpus.source in TABLES:
        yield from read_table(corpus, TABLES[corpus.source])
        return
    if corpus.source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files, prefix = _stdlib_files(root), "stdlib/"
    else:
        root = absolute(corpus.path or "")
        files, prefix = _text_files(root), ""
    for file in files:
        text = _utf8_text(file)
        if text is not None:
            doc_id = prefix + file.relative_to(root).as_posix()
            yield hashed_split(doc_id), Document(doc_id, corpus.source, text)


def _stdlib_files(root: Path) -> Iterator[Path]:
    return (file for file in _files_below(root, _STDLIB_LEFT_OUT) if file.suffix == ".py")


def _text_files(root: Path) -> Iterator[Path]:
    return (file for file in _files_below(root, _FOLDER_LEFT_OUT) if file.suffix.lower() in TEXT_SUFFIXES)


def _files_below(root: Path, left_out: set[str]) -> Iterator[Path]:
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name not in left_out and not name.startswith(".")]  # prunes the walk
        yield from (Path(folder, name) for name in names if not name.startswith("."))


def _utf8_text(file: Path) -> str | None:
    try:
        text = file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        _log.warning("%s is not UTF-8 text; skipped", file)
        return None
    return text if text.strip() else None


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise ConfigError(f"corpus.path = {path}: a file, but source `folder` needs a folder; name the one it is in")
    if next(_text_files(path), None) is None:
        endings = " ".join(TEXT_SUFFIXES)
        raise ConfigError(f"corpus.path = {path}: no text files below it; legal endings: {endings}")
