"""Documents and prompts: what is read, how it is divided, and what a prompt of an exact length holds."""

import json
import logging
import os
import random
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from bdcore.config import ConfigError, CorpusConfig
from bdcore.documents import (
    Document,
    build_prompts,
    check_corpus,
    corpus_key,
    documents_key,
    encode,
    encode_prefix,
    load_documents,
)
from tests.unit.tokenizers import BOS, UNKNOWN, WORDS, piece_tokenizer, unsplit_tokenizer, word_tokenizer

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="shared/data is not beside this checkout")


@pytest.fixture(scope="module")
def words() -> PreTrainedTokenizerFast:
    return word_tokenizer()


@pytest.fixture(scope="module")
def pieces() -> PreTrainedTokenizerFast:
    return piece_tokenizer()


@pytest.fixture(scope="module")
def unsplit() -> PreTrainedTokenizerFast:
    return unsplit_tokenizer()


def text_of(length: int) -> str:
    return " ".join(WORDS[number % len(WORDS)] for number in range(length))


def document(length: int, *, question: str | None = None) -> Document:
    return Document(f"doc-{length}", "file", text_of(length), question)


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def corpus(source: str, path: Path | None = None, split: str = "train") -> CorpusConfig:
    return CorpusConfig.model_validate({"source": source, "path": None if path is None else str(path), "split": split})


def both_splits(source: str, path: Path | None = None) -> tuple[list[Document], list[Document]]:
    return load_documents(corpus(source, path)), load_documents(corpus(source, path, "test"))


def ids_of(documents: list[Document]) -> set[str]:
    return {item.doc_id for item in documents}


def error_of(action: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


# Prompts


def test_only_documents_that_fill_the_context_become_prompts(words: PreTrainedTokenizerFast) -> None:
    documents = [document(length) for length in (300, 1023, 1024, 5000)]
    seed = next(
        s for s in range(99) if {d.doc_id for d in random.Random(s).sample(documents, 4)[:2]} == {"doc-300", "doc-1023"}
    )
    found = build_prompts(documents, words, length=1024, count=2, seed=seed)
    assert found.too_short == 2
    by_name = {prompt.doc_id: prompt for prompt in found.prompts}
    assert set(by_name) == {"doc-1024", "doc-5000"}
    assert not by_name["doc-1024"].truncated
    assert by_name["doc-5000"].truncated
    for prompt in found.prompts:
        whole = encode(words, next(d.text for d in documents if d.doc_id == prompt.doc_id))
        assert prompt.ids == whole[:1024]  # the beginning, and nothing of another document
        assert len(prompt.ids) == 1024
        assert prompt.offset == 0


def test_the_tokenizers_own_limit_neither_cuts_nor_warns(words: PreTrainedTokenizerFast) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append  # type: ignore[method-assign]
    transformers_logging.get_logger("transformers").addHandler(handler)
    try:
        assert words.model_max_length == 512
        assert len(encode(words, text_of(5000))) == 5000
    finally:
        transformers_logging.get_logger("transformers").removeHandler(handler)
    assert not records


def test_truncation_saved_with_a_tokenizer_does_not_cut(words: PreTrainedTokenizerFast) -> None:
    words.backend_tokenizer.enable_truncation(8)
    assert len(encode(words, text_of(100))) == 100


def test_documents_get_no_bos_and_spelled_specials_stay_text(words: PreTrainedTokenizerFast) -> None:
    assert words(text_of(3))["input_ids"][0] == BOS
    ids = encode(words, "w1<s> " + text_of(3))
    assert ids == [UNKNOWN, *encode(words, text_of(3))]  # "w1<s>" is a word it does not know, not w1 and BOS
    assert all(type(token) is int for token in ids)


@pytest.mark.parametrize("family", ["pieces", "unsplit"])
def test_a_prefix_encodes_like_the_whole_text(family: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(family)
    chance = random.Random(0)
    source = Path(__file__).read_text()
    texts = {
        "code": source * 3,
        "blank runs": "".join(chance.choice(["word", " " * 90, "\n" * 40, "x"]) for _ in range(2000)),
        "one long word": "".join(chance.choice("abcdefgh0123") for _ in range(30000)),
        "not latin": "".join(chr(chance.randrange(0x4E00, 0x4F00)) for _ in range(9000)),
        "sparse": "word " * 3000,
    }
    for name, text in texts.items():
        whole = encode(tokenizer, text)
        for length in (1, 50, 700, 2000):
            assert encode_prefix(tokenizer, text, length) == whole[:length], name


@pytest.mark.parametrize("family", ["pieces", "unsplit"])
@pytest.mark.parametrize(
    "rest", ["\n\nQuestion: why?", "\nnext", " and so on", "next [word]", "0 more", "    return 7"]
)
def test_what_follows_a_text_is_encoded_as_it_is_inside_one(
    family: str, rest: str, request: pytest.FixtureRequest
) -> None:
    tokenizer = request.getfixturevalue(family)
    first = "A text.\n" if rest[0].isalnum() else "A text."  # words of both would merge
    assert encode(tokenizer, first) + encode(tokenizer, rest, after=True) == encode(tokenizer, first + rest)


def test_a_prefix_of_a_long_text_is_not_read_whole(
    words: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []

    def counting(text: str, **options: Any) -> Any:
        read.append(len(text))
        return words(text, **options)

    text = text_of(200_000)
    assert encode_prefix(counting, text, 512) == encode(words, text[:10_000])[:512]  # type: ignore[arg-type]
    assert sum(read) < len(text) / 50


def test_hopelessly_short_documents_are_not_tokenised() -> None:
    def refuse(text: str, **_: Any) -> Any:
        raise AssertionError(f"tokenised {text!r}")

    short = [Document("a", "file", "x" * 500)]
    with pytest.raises(AssertionError, match="tokenised"):
        build_prompts(short, refuse, length=501, count=1, seed=0)  # type: ignore[arg-type]

    def split(text: str, **_: Any) -> dict[str, list[int]]:
        assert "y" not in text
        return {"input_ids": [1] * 1000}

    documents = [Document("a", "file", "y" * 500), Document("b", "file", "x" * 4000)]
    seed = next(s for s in range(9) if random.Random(s).sample(documents, 2)[0].doc_id == "a")
    assert build_prompts(documents, split, length=1000, count=1, seed=seed).too_short == 1  # type: ignore[arg-type]


def test_the_seed_alone_decides_which_documents_are_taken(words: PreTrainedTokenizerFast) -> None:
    documents = [document(length) for length in range(100, 130)]
    draws = [build_prompts(documents, words, length=64, count=5, seed=seed) for seed in (1, 1, 2)]
    assert draws[0] == draws[1] != draws[2]


def test_the_question_survives_the_cut(words: PreTrainedTokenizerFast) -> None:
    asked = document(5000, question="why w7 w8 w9")
    (prompt,) = build_prompts([asked], words, length=128, count=1, seed=0).prompts
    assert len(prompt.ids) == 128
    assert prompt.truncated
    assert prompt.ids[-6:] == encode(words, "Question: why w7 w8 w9 Answer:")
    start = prompt.ids.index(encode(words, "w0")[0])
    assert 0 < start < 40  # an instruction comes first
    assert prompt.ids[start:-6] == encode(words, asked.text)[: 128 - 6 - start]


@pytest.mark.parametrize(
    ("source", "first", "last"),
    [
        ("longbench", "You are given a meeting transcript and a query", "Query: why w7?\nAnswer:"),
        ("lwm", "You are given a story, which can be either a novel or a movie script", "Question: why w7?\n\nAnswer:"),
        ("file", "Below is a document.", "Question: why w7?\nAnswer:"),
    ],
)
def test_meetings_and_stories_are_asked_about_in_their_benchmarks_words(
    pieces: PreTrainedTokenizerFast, source: str, first: str, last: str
) -> None:
    asked = Document("doc", source, text_of(3000), " why w7? ")
    for length in (500, 1000):
        (prompt,) = build_prompts([asked], pieces, length=length, count=1, seed=0).prompts
        text = pieces.decode(prompt.ids)
        assert len(prompt.ids) == length and text.startswith(first) and text.endswith(f"\n\n{last}")
        between = text[text.index("w0 w1") :]
        kept = next(n for n in range(len(between)) if not asked.text.startswith(between[: n + 1]))
        assert between[kept:].startswith("\n\n"), "its text, cut, and nothing else"


@pytest.mark.parametrize(
    ("source", "first", "last"),
    [
        ("longbench", "w0 w1", "\nwhy w7?"),
        ("lwm", "You are a helpful assistant. USER: Please read a part", "Please summarize it for me.\n\nASSISTANT: "),
    ],
)
def test_the_papers_authors_prompt_in_their_own_words(
    pieces: PreTrainedTokenizerFast, source: str, first: str, last: str
) -> None:
    asked = Document("doc", source, text_of(3000), "why w7?", frame="paper")
    (prompt,) = build_prompts([asked], pieces, length=500, count=1, seed=0).prompts
    text = pieces.decode(prompt.ids)
    assert len(prompt.ids) == 500 and text.startswith(first) and text.endswith(last)
    assert ("why w7?" in text) == (source == "longbench")


def test_a_question_prompt_without_room_for_its_document_is_an_error(words: PreTrainedTokenizerFast) -> None:
    asked = document(5000, question="why " * 100)
    message = error_of(lambda: build_prompts([asked], words, length=64, count=1, seed=0))
    assert "context = 64" in message and "doc-5000" in message and "larger context" in message


def test_a_document_shorter_than_its_question_prompt_is_skipped(words: PreTrainedTokenizerFast) -> None:
    message = error_of(lambda: build_prompts([document(90, question="why")], words, length=256, count=1, seed=0))
    assert "1 are too short" in message


def test_too_few_documents_are_an_error_that_says_what_would_fit(words: PreTrainedTokenizerFast) -> None:
    documents = [document(length) for length in (300, 1023, 1024, 5000)]
    message = error_of(lambda: build_prompts(documents, words, length=1024, count=3, seed=0))
    assert "3 prompts of 1024 tokens" in message
    assert "only 2 of 4 documents" in message
    assert "2 are too short" in message and "1023 tokens" in message
    assert "smaller context" in message


# Sources


def test_the_standard_library_is_a_corpus_of_long_documents() -> None:
    train, test = both_splits("stdlib")
    documents = train + test
    assert len(documents) > 400
    assert sum(len(item.text) > 16 * 1024 for item in documents) > 100
    assert {"stdlib/argparse.py", "stdlib/json/decoder.py"} <= ids_of(documents)
    assert not any({"test", "tests", "site-packages", "idlelib"} & set(d.doc_id.split("/")) for d in documents)
    assert len(ids_of(documents)) == len(documents)
    assert ids_of(train).isdisjoint(ids_of(test))
    assert 0.2 < len(test) / len(documents) < 0.3


def test_order_is_mixed_and_the_same_on_every_run() -> None:
    names = [item.doc_id for item in load_documents(corpus("stdlib", split="test"))]
    assert names == [item.doc_id for item in load_documents(corpus("stdlib", split="test"))]
    assert names != sorted(names)


def test_a_folder_gives_its_text_files_by_relative_path(tmp_path: Path) -> None:
    for number in range(12):
        (tmp_path / f"note-{number}.txt").write_text(f"text {number}")
    (tmp_path / "deep" / "er").mkdir(parents=True)
    (tmp_path / "deep" / "er" / "page.MD").write_bytes(b"\xef\xbb\xbfline\r\nline")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "hidden.txt").write_text("hidden")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    (tmp_path / "empty.txt").write_text(" \n")
    train, test = both_splits("folder", tmp_path)
    assert ids_of(train).isdisjoint(ids_of(test))
    texts = {item.doc_id: item.text for item in train + test}
    assert set(texts) == {"deep/er/page.MD", *(f"note-{number}.txt" for number in range(12))}
    assert texts["deep/er/page.MD"] == "line\nline"


@pytest.mark.parametrize("write", [write_parquet, write_jsonl])
def test_a_table_gives_a_document_per_row(tmp_path: Path, write: Callable[[Path, list[dict[str, Any]]], Path]) -> None:
    rows = [{"id": number, "text": f"text {number}", "other": [number]} for number in range(40)]
    path = write(tmp_path / ("t.parquet" if write is write_parquet else "t.jsonl"), [*rows, {"id": 99, "text": ""}])
    train, test = both_splits("file", path)
    assert ids_of(train) | ids_of(test) == {str(number) for number in range(40)}
    assert ids_of(train).isdisjoint(ids_of(test)) and test


def test_rows_without_a_name_get_one_from_file_and_row(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"text": "a", "split": "train"}, {"text": "b", "split": "train"}])
    assert ids_of(load_documents(corpus("file", path))) == {"t.jsonl:0", "t.jsonl:1"}


def test_a_split_column_decides_where_there_is_one(tmp_path: Path) -> None:
    rows = [{"book_id": n, "text": f"book {n}", "split": "test" if n < 5 else "train"} for n in range(20)]
    train, test = both_splits("pg19", write_parquet(tmp_path / "books.parquet", rows))
    assert ids_of(test) == {f"pg19/{n}" for n in range(5)}
    assert len(train) == 15


def test_split_files_of_a_folder_are_read_each_for_its_split(tmp_path: Path) -> None:
    for split, number in (("train", 1), ("test", 2)):
        rows = [{"url": f"http://www.gutenberg.org/ebooks/{number}", "text": f"book {number}"}]
        write_parquet(tmp_path / "data" / f"{split}-00000-of-00001-abc.parquet", rows)  # as the hub stores it
    train, test = both_splits("pg19", tmp_path)
    assert (ids_of(train), ids_of(test)) == ({"pg19/1"}, {"pg19/2"})


def test_a_meeting_is_one_document_with_its_first_question(tmp_path: Path) -> None:
    rows = [
        {"_id": f"{m}-{q}", "context": f"meeting {m}", "input": f"question {q}"} for m in range(30) for q in range(3)
    ]
    train, test = both_splits("longbench", write_parquet(tmp_path / "qmsum.parquet", rows))
    assert len(train) + len(test) == 30
    assert {item.text for item in train}.isdisjoint(item.text for item in test)
    assert {item.question for item in train + test} == {"question 0"}


def test_nested_rows_of_the_hub_are_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        {"document": {"id": f"d{d}", "text": f"story {d}"}, "question": {"text": f"q{q}", "tokens": ["q"]}}
        for d in range(20)
        for q in range(2)
    ]
    asked: list[tuple[Any, ...]] = []

    class Rows(list[dict[str, Any]]):
        column_names = ("document", "question")

        def select_columns(self, names: list[str]) -> "Rows":
            assert names == ["document", "question"]
            return self

    def load(name: str, config: str | None, *, split: str) -> Rows:
        asked.append((name, config, split))
        return Rows(rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    from_hub = load_documents(corpus("lwm"))
    assert asked == [("deepmind/narrativeqa", None, "train")]
    assert {item.doc_id: item.question for item in from_hub} == {f"lwm/d{d}": "q0" for d in range(20)}
    train, test = both_splits("lwm", write_parquet(tmp_path / "narrativeqa.parquet", rows))
    assert documents_key(train + test) == documents_key(from_hub)


def test_an_unreachable_hub_is_a_one_line_error_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: Any, **__: Any) -> None:
        raise ConnectionError("no\nroute")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    message = error_of(lambda: load_documents(corpus("longbench")))
    assert "Xnhyacinth/LongBench" in message and "no route" in message
    assert "corpus.path" in message and "context" in message


def test_the_key_follows_the_content_not_the_path(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for number in range(9):
            (tmp_path / name / f"{number}.txt").write_text(f"text {number}")
    before = corpus_key(corpus("folder", tmp_path / "one"))
    assert before == corpus_key(corpus("folder", tmp_path / "two"))
    changed = next(iter(load_documents(corpus("folder", tmp_path / "one")))).doc_id
    stat = (tmp_path / "one" / changed).stat()
    (tmp_path / "one" / changed).write_text("tEXT" + changed[0])
    os.utime(tmp_path / "one" / changed, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert before != corpus_key(corpus("folder", tmp_path / "one"))
    assert before != corpus_key(corpus("folder", tmp_path / "two", "test"))


def test_the_key_counts_questions_and_not_order() -> None:
    one, two = document(3), document(4)
    assert documents_key([one, two]) == documents_key([two, one])
    assert documents_key([one]) != documents_key([document(3, question="why")])


# Bad input


def test_a_path_that_is_needed_is_asked_for() -> None:
    for source in ("folder", "file"):
        message = error_of(lambda source=source: check_corpus(corpus(source)))
        assert "corpus.path" in message and source in message


def test_a_path_that_is_not_there_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for source in ("folder", "file", "pg19", "longbench", "lwm"):
        message = error_of(lambda source=source: check_corpus(corpus(source, Path("missing"))))
        assert f"corpus.path = {tmp_path.resolve() / 'missing'}" in message


def test_places_of_the_wrong_kind_are_refused_before_reading(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text("a,b")
    (tmp_path / "empty").mkdir()
    cases = {
        "no text files": ("folder", tmp_path / "empty"),
        "needs a folder": ("folder", file),
        ".parquet or .jsonl": ("file", file),
        "needs a .parquet": ("file", tmp_path),
        "train.parquet": ("pg19", tmp_path),
        "qmsum.parquet": ("longbench", tmp_path),
        "narrativeqa.parquet": ("lwm", tmp_path),
        "takes none": ("stdlib", tmp_path),
    }
    for expected, (source, path) in cases.items():
        message = error_of(lambda source=source, path=path: check_corpus(corpus(source, path)))
        assert expected in message and str(path) in message


def test_a_missing_column_is_answered_with_the_columns_there_are(tmp_path: Path) -> None:
    rows = [{"body": "x", "title": "y"}]
    for path in (write_parquet(tmp_path / "a.parquet", rows), write_jsonl(tmp_path / "a.jsonl", rows)):
        message = error_of(lambda path=path: check_corpus(corpus("file", path)))
        assert "`text`" in message and "body, title" in message
    without_question = write_parquet(tmp_path / "q.parquet", [{"context": "x"}])
    assert "`input`" in error_of(lambda: check_corpus(corpus("longbench", without_question)))


def test_broken_files_are_one_line_errors_that_name_the_place(tmp_path: Path) -> None:
    torn = write_parquet(tmp_path / "torn.parquet", [{"text": "x" * 1000}])
    torn.write_bytes(torn.read_bytes()[:100])
    assert str(torn) in error_of(lambda: check_corpus(corpus("file", torn)))
    lines = tmp_path / "bad.jsonl"
    lines.write_text('{"text": "a"}\n{"text": \n')
    assert "line 2" in error_of(lambda: load_documents(corpus("file", lines)))
    half = write_jsonl(tmp_path / "half.jsonl", [{"text": "fine"}, {"text": "\ud800"}])
    assert "half.jsonl:1" in error_of(lambda: load_documents(corpus("file", half)))
    numbers = write_parquet(tmp_path / "numbers.parquet", [{"text": 1}])
    assert "`text`" in error_of(lambda: load_documents(corpus("file", numbers)))


def test_two_documents_of_one_name_are_refused(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"id": "same", "text": "a"}, {"id": "same", "text": "b"}])
    assert "'same'" in error_of(lambda: load_documents(corpus("file", path)))


def test_a_split_without_documents_is_an_error_that_counts_the_others(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "t.jsonl", [{"id": 1, "text": "a", "split": "train"}])
    message = error_of(lambda: load_documents(corpus("file", path, "test")))
    assert "corpus.split = test" in message and "1 in `train`" in message


# Real data


@needs_data
def test_books_come_in_their_own_splits() -> None:
    train, test = both_splits("pg19", DATA / "pg19")
    assert (len(train), len(test)) == (60, 20)
    assert "pg19/10146" in ids_of(test)
    assert error_of(lambda: load_documents(corpus("pg19", DATA / "pg19" / "test.parquet"))).count("20 in `test`") == 1


@needs_data
@pytest.mark.parametrize(
    ("source", "path", "count"),
    [("longbench", "longbench", 35), ("longbench", "longbench/qmsum_validation.parquet", 35), ("lwm", "lwm", 24)],
)
def test_question_sets_are_divided_by_document(source: str, path: str, count: int) -> None:
    train, test = both_splits(source, DATA / path)
    assert len(train) + len(test) == count == len(ids_of(train) | ids_of(test))
    assert len({item.text for item in train + test}) == count
    assert all(item.question for item in train + test)
    assert len(test) >= count // 5
