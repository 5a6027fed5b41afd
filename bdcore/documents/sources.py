"""Where long text comes from: source files, local tables and named hub data sets become documents with stable names.

It does not tokenise, cut or sample; `prompts` does. Nothing is written, and only the hub needs a network.
"""

import hashlib
import json
import logging
import os
import sysconfig
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq

from bdcore.config import ConfigError, CorpusConfig
from bdcore.identity import digest

_PROSE = (".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".adoc")
_CODE = (".py", ".c", ".h", ".cc", ".cpp", ".hpp", ".java", ".js", ".ts", ".go", ".rs", ".rb", ".sh")
TEXT_SUFFIXES = (*_PROSE, *_CODE)
TABLE_SUFFIXES = (".parquet", ".jsonl")
# Tests, demos and bundled data of the standard library: either not written to be read, or not installed everywhere.
_STDLIB_LEFT_OUT = {
    *("site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"),
    *("idlelib", "lib2to3", "turtledemo", "ensurepip", "_bundled", "pydoc_data"),
}
_FOLDER_LEFT_OUT = {"__pycache__", "node_modules"}
_log = logging.getLogger(__name__)

Row = dict[str, Any]


@dataclass(frozen=True)
class Document:
    """One text under a name that is the same on every run; `question` is what is to be answered from it."""

    doc_id: str
    source: str
    text: str
    question: str | None = None


@dataclass(frozen=True)
class _Table:
    """How rows become documents. Dotted columns reach into nested ones; of alternatives the first present counts.

    `folder`: what to look for in a folder. A `{split}` in it or in `hub_split` means that the rows come divided.
    `whole_file`: a single file without a `split` column belongs to whichever split is asked for.
    """

    text: tuple[str, ...]
    name: tuple[str, ...]
    question: tuple[str, ...] = ()
    folder: tuple[str, ...] = ()
    hub: str = ""
    hub_config: str | None = None
    hub_split: str = "{split}"
    whole_file: bool = False

    @property
    def columns(self) -> tuple[str, ...]:
        return (*self.text, *self.name, *self.question, "split")


_TABLES = {
    "file": _Table(text=("text",), name=("doc_id", "id")),
    "pg19": _Table(
        text=("text",),
        name=("book_id", "url"),
        folder=("{split}.parquet", "data/{split}-*.parquet"),
        hub="emozilla/pg19",
        whole_file=True,
    ),
    "longbench": _Table(
        text=("context",),
        name=("meeting_id", "_id", "id"),
        question=("input",),
        folder=("qmsum.parquet",),
        hub="Xnhyacinth/LongBench",
        hub_config="qmsum",
        hub_split="test",
    ),
    "lwm": _Table(
        text=("document_text", "document.text"),
        name=("document_id", "document.id"),
        question=("question", "question.text"),
        folder=("narrativeqa.parquet", "data/{split}-*.parquet"),
        hub="deepmind/narrativeqa",
    ),
}


def check_corpus(corpus: CorpusConfig) -> None:
    """Raise ConfigError for every fault that can be known without reading texts or asking the hub."""
    if corpus.path is None:
        if corpus.source in ("folder", "file"):
            wanted = "a folder of text files" if corpus.source == "folder" else "a .parquet or .jsonl file"
            raise ConfigError(f"corpus.path is not set: source `{corpus.source}` needs {wanted}")
        return
    path = _absolute(corpus.path)
    if corpus.source == "stdlib":
        raise ConfigError(f"corpus.path = {path}: source `stdlib` takes none; remove it or choose `folder`")
    if not path.exists():
        raise ConfigError(f"corpus.path = {path}: no such file or folder; correct it")
    with _one_line_errors(f"corpus.path = {path}"):
        if corpus.source == "folder":
            _check_folder(path)
        else:
            for file in _table_files(corpus, path)[0]:
                _check_table(file, _TABLES[corpus.source])


def load_documents(corpus: CorpusConfig) -> list[Document]:
    """The documents of `corpus.split`, in a mixed order that is the same on every run."""
    check_corpus(corpus)
    found: Counter[str] = Counter()
    seen: set[str] = set()
    documents: list[Document] = []
    with _one_line_errors(_where(corpus)):
        for split, document in _read(corpus):
            if document.doc_id in seen:
                raise ConfigError(f"{_where(corpus)}: two documents are named {document.doc_id!r}; give each its own")
            seen.add(document.doc_id)
            found[split] += 1
            if split == corpus.split:
                documents.append(document)
    if not documents:
        have = ", ".join(f"{count} in `{split}`" for split, count in sorted(found.items())) or "none at all"
        raise ConfigError(
            f"corpus.split = {corpus.split}: no documents of this split in {_where(corpus)} (found {have}); "
            "use the other split or a larger corpus"
        )
    return sorted(documents, key=lambda document: (digest("order", document.doc_id), document.doc_id))


def documents_key(documents: Iterable[Document]) -> str:
    """Identity of documents by name and content, whatever their order."""
    return digest(sorted([d.doc_id, d.source, _text_hash(d.text), d.question or ""] for d in documents))


def corpus_key(corpus: CorpusConfig) -> str:
    """Identity of the content that `corpus` reads now: an edited file under the same path gives another key."""
    return documents_key(load_documents(corpus))


def _text_hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _absolute(path: str) -> Path:
    return Path(path).expanduser().resolve()


def _where(corpus: CorpusConfig) -> str:
    if corpus.path is not None:
        return f"corpus.path = {_absolute(corpus.path)}"
    return f"corpus.source = {corpus.source}"


@contextmanager
def _one_line_errors(where: str) -> Generator[None]:
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError) as error:  # unreadable, not UTF-8, not JSON, not Parquet
        raise ConfigError(f"{where}: {_brief(error)}; replace or repair the file") from error


def _brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _hashed_split(doc_id: str) -> str:
    # 1 of 4. With this salt the small sets (QMSum's 35 meetings, 24 NarrativeQA books) divide close to that, too.
    return "test" if int(digest("split 207", doc_id), 16) % 4 == 0 else "train"


def _read(corpus: CorpusConfig) -> Iterator[tuple[str, Document]]:
    """(split, document) of everything the corpus holds, as far as its splits can be told apart while reading."""
    if corpus.source in _TABLES:
        yield from _read_table(corpus, _TABLES[corpus.source])
        return
    if corpus.source == "stdlib":
        root = Path(sysconfig.get_paths()["stdlib"])
        files, prefix = _stdlib_files(root), "stdlib/"
    else:
        root = _absolute(corpus.path or "")
        files, prefix = _text_files(root), ""
    for file in files:
        text = _utf8_text(file)
        if text is not None:
            doc_id = prefix + file.relative_to(root).as_posix()
            yield _hashed_split(doc_id), Document(doc_id, corpus.source, text)


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


def _table_files(corpus: CorpusConfig, path: Path) -> tuple[list[Path], bool]:
    """The files to read, and whether their place already says that they belong to `corpus.split`."""
    table = _TABLES[corpus.source]
    if path.is_file():
        if path.suffix.lower() not in TABLE_SUFFIXES:
            raise ConfigError(f"corpus.path = {path}: source `{corpus.source}` reads {' or '.join(TABLE_SUFFIXES)}")
        return [path], table.whole_file
    for pattern in table.folder:
        files = sorted(path.glob(pattern.format(split=corpus.split)))
        if files:
            return files, "{split}" in pattern
    names = " or ".join(pattern.format(split=corpus.split) for pattern in table.folder)
    remedy = f"needs {names} in it" if names else f"needs a {' or '.join(TABLE_SUFFIXES)} file"
    raise ConfigError(f"corpus.path = {path}: a folder; source `{corpus.source}` {remedy}")


def _check_table(file: Path, table: _Table) -> None:
    have = _columns(file)
    for names in (table.text, table.question):
        if names and not have.intersection(names):
            wanted = " or ".join(f"`{name}`" for name in names)
            raise ConfigError(f"corpus.path = {file}: no column {wanted}; it has {', '.join(sorted(have)) or 'none'}")


def _columns(file: Path) -> set[str]:
    if file.suffix.lower() == ".parquet":
        schema = _parquet(file).schema
        return {schema.column(index).path for index in range(len(schema.names))}
    row = next(_json_rows(file), Row())
    return {*row, *(f"{name}.{inner}" for name, value in row.items() for inner in _mapping(value))}


def _parquet(file: Path) -> Any:
    return pq.ParquetFile(file)


def _mapping(value: Any) -> Row:
    return cast(Row, value) if isinstance(value, dict) else {}


def _json_rows(file: Path) -> Iterator[Row]:
    with file.open(encoding="utf-8-sig") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _json_row(line, f"corpus.path = {file}: line {number}")


def _json_row(line: str, where: str) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON ({error.msg}); correct or remove it") from error
    if not isinstance(row, dict):
        raise ConfigError(f"{where} is not a JSON object; write one {{...}} per line")
    return cast(Row, row)


def _file_rows(file: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    if file.suffix.lower() != ".parquet":
        yield from _json_rows(file)
        return
    have = _columns(file)
    for batch in _parquet(file).iter_batches(batch_size=32, columns=[name for name in columns if name in have]):
        yield from batch.to_pylist()


def _hub_rows(corpus: CorpusConfig, table: _Table) -> Iterator[Row]:
    split = table.hub_split.format(split=corpus.split)
    try:
        # Imported here: it is slow to import, and local files do not need it.
        data = import_module("datasets").load_dataset(table.hub, table.hub_config, split=split)
    except Exception as error:  # the hub client raises its own, its HTTP library's and builtin errors
        columns = ", ".join(names[0] for names in (table.text, table.name, table.question) if names)
        raise ConfigError(
            f"corpus.source = {corpus.source}: cannot load {table.hub} from the hub ({_brief(error)}); "
            f"set corpus.path to a local Parquet file with the columns {columns}"
        ) from error
    tops = {name.partition(".")[0] for name in table.columns}
    yield from data.select_columns([name for name in data.column_names if name in tops])


def _read_table(corpus: CorpusConfig, table: _Table) -> Iterator[tuple[str, Document]]:
    seen: set[str] = set()  # of question tables, which repeat a document for each of its questions
    for origin, row_number, row, divided in _located_rows(corpus, table):
        document = _row_document(corpus, table, row, f"{origin}:{row_number}")
        if document is None:
            continue
        if table.question:
            if not seen.isdisjoint((document.doc_id, document.text)):
                continue
            seen.update((document.doc_id, document.text))
        stated = row.get("split")
        if stated is None:
            stated = corpus.split if divided else _hashed_split(document.doc_id)
        yield str(stated), document


def _located_rows(corpus: CorpusConfig, table: _Table) -> Iterator[tuple[str, int, Row, bool]]:
    """(origin, row number, row, whether the origin belongs to `corpus.split` as a whole)."""
    if corpus.path is None:
        divided = "{split}" in table.hub_split
        for number, row in enumerate(_hub_rows(corpus, table)):
            yield table.hub, number, row, divided
        return
    files, divided = _table_files(corpus, _absolute(corpus.path))
    for file in files:
        for number, row in enumerate(_file_rows(file, table.columns)):
            yield file.name, number, row, divided


def _row_document(corpus: CorpusConfig, table: _Table, row: Row, place: str) -> Document | None:
    text = _pick(row, table.text)
    if text is None or text == "":
        return None
    if not isinstance(text, str) or not _is_unicode(text):
        raise ConfigError(f"{_where(corpus)}: row {place} has no valid text in `{table.text[0]}`; correct or remove it")
    if not text.strip():
        return None
    name = _row_name(row, table, place)
    question = _pick(row, table.question)
    doc_id = name if corpus.source == "file" else f"{corpus.source}/{name}"
    return Document(doc_id, corpus.source, text, None if question is None else str(question))


def _row_name(row: Row, table: _Table, place: str) -> str:
    name = _pick(row, table.name)
    if name is None:
        return place
    # PG-19 on the hub has no book_id; the last part of its Gutenberg address is the same number.
    return str(name).rpartition("/")[2] if name == row.get("url") else str(name)


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell half of a surrogate pair
        return False
    return True


def _pick(row: Row, names: tuple[str, ...]) -> Any:
    for name in names:
        value: Any = row
        for part in name.split("."):
            value = _mapping(value).get(part)
        if value is not None and not isinstance(value, dict):
            return value  # pyright: ignore[reportUnknownVariableType]
    return None
