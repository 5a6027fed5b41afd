"""Target sets on disk: read a row at a time within a bound of memory, counted by column, made of distinct prompts."""

import random
import warnings
from collections import Counter

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from bdcore.config import ConfigError
from bdcore.documents import Document, Prompt
from bdcore.schema import SAMPLES, TARGETS, write_rows
from bdcore.targets import rows as module
from bdcore.targets.generate import Greedy
from bdcore.targets.prompts import check_held_out, distinct, distinct_prompts
from bdcore.targets.rows import TargetRow, TargetRows, document_ids, id_counts, row
from bdcore.targets.shards import DamagedShard, shard_facts
from tests.tiny import byte_tokenizer

K = 3


def target(doc, mode, prompt, new):
    """A row of the table with numbers of its own."""
    rng = random.Random(f"{doc} {mode}")
    top = [rng.sample(range(50), K) for _ in range(new)]
    logprobs = [[-rng.randrange(1, 64) / 8 for _ in range(K)] for _ in range(new)]  # exact in float32
    greedy = Greedy([ids[0] for ids in top], top, logprobs, "length" if mode == "forced" else "eos")
    return row(Prompt(doc, "folder", 4, [rng.randrange(50) for _ in range(prompt)], True), greedy, mode)


FORCED = [target(f"text-{i}", "forced", n, n) for i, n in enumerate((4, 6, 5, 9, 7))]
GENERATED = [target(f"text-{i}", "generated", 4, n) for i, n in enumerate((8, 1, 3))]


@pytest.fixture
def folder(tmp_path):
    """Row groups of 2, 2, 1 and 2, 1 rows."""
    write_rows(tmp_path / "part-generated-00000.parquet", GENERATED, TARGETS, row_group_size=2)
    write_rows(tmp_path / "part-forced-00000.parquet", FORCED, TARGETS, row_group_size=2)
    return tmp_path


@pytest.fixture
def reads(monkeypatch):
    """(mode, row group) of every read of rows, in order."""
    seen, read = [], module._read_group

    def watched(path, group):
        seen.append((path.name.split("-")[1], group))
        return read(path, group)

    monkeypatch.setattr(module, "_read_group", watched)
    return seen


def same(mine: TargetRow, theirs: dict):
    for name in ("doc_id", "mode", "finish_reason"):
        assert getattr(mine, name) == theirs[name]
    for name in ("prompt_ids", "target_ids", "topk_ids", "topk_logprobs"):
        array = getattr(mine, name)
        assert array.dtype == (np.float32 if name == "topk_logprobs" else np.int32)
        assert array.tolist() == theirs[name], name


def test_every_row_comes_back_in_shard_order_as_it_was_written(folder):
    found = TargetRows(folder)
    plain = [r for path in sorted(folder.glob("*.parquet")) for r in pq.ParquetFile(path).read().to_pylist()]
    assert [r["doc_id"] for r in plain] == [r["doc_id"] for r in [*FORCED, *GENERATED]]
    assert len(found) == 8
    for i in random.Random(0).sample(range(8), 8):  # across row groups and shards in any order
        same(found[i], plain[i])
    assert found[3].topk_ids.shape == (9, K)
    assert found[6].topk_logprobs.shape == (1, K)


def test_names_modes_and_lengths_are_known_without_reading_a_row(folder, reads):
    found = TargetRows(folder)
    assert found.doc_ids == [*(f"text-{i}" for i in range(5)), *(f"text-{i}" for i in range(3))]
    assert found.modes == ["forced"] * 5 + ["generated"] * 3
    assert found.lengths == [4, 6, 5, 9, 7, 4 + 8 - 1, 4, 4 + 3 - 1]
    assert reads == []
    assert [r.length for r in found] == found.lengths


def test_rows_are_a_sequence(folder):
    found = TargetRows(folder)
    same(found[-1], GENERATED[-1])
    assert [r.doc_id for r in found[3:6]] == ["text-3", "text-4", "text-0"]
    with pytest.raises(IndexError):
        found[8]


def test_the_row_groups_used_last_stay_and_others_are_read_again(folder, reads):
    sizes = [sum(r.nbytes for r in TargetRows(folder)[cut]) for cut in (slice(0, 2), slice(2, 4), slice(4, 5))]
    reads.clear()
    found = TargetRows(folder, cache_bytes=sizes[0] + max(sizes[1:]))
    for i in (0, 1, 2, 0, 4, 1, 3):
        same(found[i], FORCED[i])
    # Group 1 goes when 2 comes, since 0 was used after it.
    assert reads == [("forced", 0), ("forced", 1), ("forced", 2), ("forced", 1)]


def test_the_cache_is_counted_in_the_bytes_of_its_arrays():
    # 4 bytes for each of 4 + 4 ids, and 8 for each of 4 x 3 ids with log-probabilities.
    assert TargetRows.of(FORCED[:1])[0].nbytes == 4 * 8 + 8 * 12


def test_rows_beyond_any_cache_are_read_all_the_same(folder, reads):
    found = TargetRows(folder, cache_bytes=0)
    for i in (0, 1, 7, 0, 2):
        same(found[i], [*FORCED, *GENERATED][i])
    assert reads == [("forced", 0), ("generated", 1), ("forced", 0), ("forced", 1)]
    assert len(found._cache) == 1


def test_arrays_become_tensors_without_a_warning(folder):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.from_numpy(TargetRows(folder)[0].topk_ids).tolist() == FORCED[0]["topk_ids"]


def test_rows_in_memory_read_like_rows_on_disk(folder):
    few = [{k: v for k, v in r.items() if k not in ("source", "offset", "truncated")} for r in [*FORCED, *GENERATED]]
    memory, disk = TargetRows.of(few), TargetRows(folder)
    assert (memory.doc_ids, memory.modes, memory.lengths) == (disk.doc_ids, disk.modes, disk.lengths)
    for mine, theirs in zip(memory, few, strict=True):
        same(mine, theirs)


# --- shards by column


def test_documents_and_greedy_ids_are_counted_over_all_shards(folder):
    assert document_ids(folder) == {f"text-{i}" for i in range(5)}
    expected = Counter(i for r in [*FORCED, *GENERATED] for i in r["target_ids"])
    counts = id_counts(folder, 60)
    assert (counts.dtype, counts.shape) == (torch.int64, (60,))
    assert counts.tolist() == [expected[i] for i in range(60)]


def test_an_id_outside_the_vocabulary_is_an_error_not_a_longer_count(folder):
    most = max(i for r in FORCED for i in r["target_ids"])
    with pytest.raises(ValueError, match=rf"part-forced-00000.parquet: .* to {most} in a vocabulary of {most}"):
        id_counts(folder, most)


def test_a_shard_tells_its_documents_and_tokens_or_that_it_is_damaged(folder):
    path = folder / "part-forced-00000.parquet"
    assert shard_facts(path) == ([f"text-{i}" for i in range(5)], 4 + 6 + 5 + 9 + 7)
    path.write_bytes(path.read_bytes()[:-20])
    assert shard_facts(path) is None
    write_rows(path, [], SAMPLES)
    assert shard_facts(path) is None


@pytest.mark.parametrize("read", [TargetRows, document_ids, lambda folder: id_counts(folder, 60)])
def test_a_damaged_shard_is_named_with_what_to_do(folder, read):
    path = folder / "part-forced-00000.parquet"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(DamagedShard, match=rf"{path}: a damaged target shard .* run the same command again"):
        read(folder)


def test_a_shard_that_is_damaged_after_it_was_opened_is_named_too(folder):
    found, path = TargetRows(folder), folder / "part-forced-00000.parquet"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DamagedShard, match=f"{path}: a damaged target shard"):
        found[0]


# --- distinct prompts


def numbered(name, ids):
    return Prompt(name, "folder", 0, ids, False)


def test_of_prompts_with_equal_tokens_the_first_is_kept():
    prompts = [numbered(n, i) for n, i in [("a", [1, 2]), ("b", [1, 3]), ("c", [1, 2]), ("d", [1, 3]), ("e", [12])]]
    kept, dropped = distinct(prompts)
    assert [p.doc_id for p in kept] == ["a", "b", "e"]
    assert [p.doc_id for p in dropped] == ["c", "d"]


# Licences under two and three names: the first 16 bytes of text-0, -3 and -6 are one, of text-1 and -5 another.
TEXTS = [
    *("the first licence ", "the other licence ", "a text like nothing else", "the first licence, longer", "short"),
    *("the other licence too", "the first licence in a third place", "words that stand here alone"),
]
DOCUMENTS = [Document(f"text-{i}", "folder", text) for i, text in enumerate(TEXTS)]


@pytest.mark.parametrize("seed", range(8))
def test_a_repeated_prompt_makes_room_for_the_next_document(seed):
    found = distinct_prompts(DOCUMENTS, byte_tokenizer(), length=16, count=3, seed=seed)
    kept: dict[str, str] = {}  # beginning -> name
    short, repeated = 0, 0
    for document in random.Random(seed).sample(DOCUMENTS, len(DOCUMENTS)):
        beginning = document.text[:16]
        if len(kept) == 3:
            break
        if len(beginning) < 16:
            short += 1
        elif beginning in kept:
            repeated += 1
        else:
            kept[beginning] = document.doc_id
    assert [p.doc_id for p in found.prompts] == list(kept.values())
    assert (found.too_short, found.duplicates) == (short, repeated)


def test_too_few_distinct_prompts_are_refused_with_both_counts():
    assert len(distinct_prompts(DOCUMENTS, byte_tokenizer(), length=16, count=4, seed=0).prompts) == 4
    with pytest.raises(ConfigError, match=r"^5 distinct prompts of 16 tokens: .* 8 documents .* at least [1-3] repeat"):
        distinct_prompts(DOCUMENTS, byte_tokenizer(), length=16, count=5, seed=0)


def test_a_corpus_that_is_too_small_without_repeats_says_what_it_always_said():
    with pytest.raises(ConfigError, match="only 2 of 2 documents will do"):
        distinct_prompts(DOCUMENTS[:2], byte_tokenizer(), length=16, count=3, seed=0)


def test_a_prompt_of_a_document_of_the_grid_is_an_error_that_names_it():
    prompts = [numbered(f"text-{i}", [i]) for i in range(4)]
    check_held_out(prompts, DOCUMENTS, DOCUMENTS[4:])
    with pytest.raises(ValueError, match=r"\['text-2', 'text-3'\] are in grid.corpus too"):
        check_held_out(prompts, DOCUMENTS, DOCUMENTS[2:])


LONG = "words that stand here alone " * 20


@pytest.mark.parametrize(
    "other",
    [
        Document("copy", "folder", LONG.replace(" ", "\r\n") + "\n"),
        Document("needle@0.5/text-1", "needle", "the filler's own text", filler="text-1"),
        Document("needle@0.5/copy", "needle", LONG, filler="copy"),
    ],
)
def test_a_prompt_of_a_text_of_the_grid_is_an_error_that_names_both(other):
    documents = [Document("text-0", "folder", "another text"), Document("text-1", "folder", LONG)]
    prompts = [numbered("text-0", [0]), numbered("text-1", [1])]
    with pytest.raises(ValueError, match=rf"\['text-1 as {other.doc_id}'\] are in grid.corpus too"):
        check_held_out(prompts, documents, [other])
    check_held_out(prompts[:1], documents, [other])
