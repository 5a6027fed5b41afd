"""Tables as documents: local Parquet and JSONL, and named hub data sets, with what their columns mean."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq

from bdcore.config import ConfigError, CorpusConfig
from bdcore.documents.document import Document, absolute, brief, hashed_split, where

TABLE_SUFFIXES = (".parquet", ".jsonl")

Row = dict[str, Any]


@dataclass(frozen=True)
class Table:
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


TABLES = {
    "file": Table(text=("text",), name=("doc_id", "id")),
    "pg19": Table(
        text=("text",),
        name=("book_id", "url"),
        folder=("{split}.parquet", "data/{split}-*.parquet"),
        hub="emozilla/pg19",
        whole_file=True,
    ),
    "longbench": Table(
        text=("context",),
        name=("meeting_id", "_id", "id"),
        question=("input",),
        folder=("qmsum.parquet",),
        hub="Xnhyacinth/LongBench",
        hub_config="qmsum",
        hub_split="test",
    ),
    "lwm": Table(
        text=("document_text", "document.text"),
        name=("document_id", "document.id"),
        question=("question", "question.text"),
        folder=("narrativeqa.parquet", "data/{split}-*.parquet"),
        hub="deepmind/narrativeqa",
    ),
}


def table_files(corpus: CorpusConfig, path: Path) -> tuple[list[Path], bool]:
    """The files to read, and whether their place already says that they belong to `corpus.split`."""
    table = TABLES[corpus.source]
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


def check_table(file: Path, table: Table) -> None:
    have = _columns(file)
    for names in (table.text, table.question):
        if names and not have.intersection(names):
            wanted = " or ".join(f"`{name}`" for name in names)
            raise ConfigError(f"corpus.path = {file}: no column {wanted}; it has {', '.join(sorted(have)) or 'none'}")


def read_table(corpus: CorpusConfig, table: Table) -> Iterator[tuple[str, Document]]:
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
            stated = corpus.split if divided else hashed_split(document.doc_id)
        yield str(stated), document


def _located_rows(corpus: CorpusConfig, table: Table) -> Iterator[tuple[str, int, Row, bool]]:
    """(origin, row number, row, whether the origin belongs to `corpus.split` as a whole)."""
    if corpus.path is None:
        divided = "{split}" in table.hub_split
        for number, row in enumerate(_hub_rows(corpus, table)):
            yield table.hub, number, row, divided
        return
    files, divided = table_files(corpus, absolute(corpus.path))
    for file in files:
        for number, row in enumerate(_file_rows(file, table.columns)):
            yield file.name, number, row, divided


def _row_document(corpus: CorpusConfig, table: Table, row: Row, place: str) -> Document | None:
    text = _pick(row, table.text)
    if text is None or text == "":
        return None
    if not isinstance(text, str) or not _is_unicode(text):
        raise ConfigError(f"{where(corpus)}: row {place} has no valid text in `{table.text[0]}`; correct or remove it")
    if not text.strip():
        return None
    name = _row_name(row, table, place)
    question = _pick(row, table.question)
    doc_id = name if corpus.source == "file" else f"{corpus.source}/{name}"
    return Document(doc_id, corpus.source, text, None if question is None else str(question))


def _row_name(row: Row, table: Table, place: str) -> str:
    name = _pick(row, table.name)
    if name is None:
        return place
    # PG-19 on the hub has no book_id; the last part of its Gutenberg address is the same number.
    return str(name).rpartition("/")[2] if name == row.get("url") else str(name)


def _file_rows(file: Path, columns: tuple[str, ...]) -> Iterator[Row]:
    if file.suffix.lower() != ".parquet":
        yield from _json_rows(file)
        return
    have = _columns(file)
    for batch in _parquet(file).iter_batches(batch_size=32, columns=[name for name in columns if name in have]):
        yield from batch.to_pylist()


def _hub_rows(corpus: CorpusConfig, table: Table) -> Iterator[Row]:
    split = table.hub_split.format(split=corpus.split)
    try:
        # Imported here: it is slow to import, and local files do not need it.
        data = import_module("datasets").load_dataset(table.hub, table.hub_config, split=split)
    except Exception as error:  # the hub client raises its own, its HTTP library's and builtin errors
        columns = ", ".join(names[0] for names in (table.text, table.name, table.question) if names)
        raise ConfigError(
            f"corpus.source = {corpus.source}: cannot load {table.hub} from the hub ({brief(error)}); "
            f"set corpus.path to a local Parquet file with the columns {columns}"
        ) from error
    tops = {name.partition(".")[0] for name in table.columns}
    yield from data.select_columns([name for name in data.column_names if name in tops])


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
