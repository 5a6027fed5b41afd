"""The only way rows become Parquet: exact keys, no nulls where one is required, nothing that is not a number."""

import math

import duckdb
import pyarrow.parquet as pq
import pytest

from bdcore.schema import ROUNDS, SAMPLES, TARGETS, read_rows, to_table, write_rows


def target(**changes):
    return {
        "doc_id": "d", "source": "stdlib", "offset": 0, "prompt_ids": [1, 2], "target_ids": [2, 3], "mode": "forced",
        "finish_reason": "length", "topk_ids": [[2, 4], [3, 4]], "topk_logprobs": [[-0.1, -3.0], [-0.2, -2.0]],
        "truncated": False, **changes,
    }  # fmt: skip


def sample(**changes):
    required = {
        "run_key": "r", "cell_key": "c", "method": "ar", "workload": "greedy", "corpus": "stdlib", "doc_id": "d",
        "context": 40, "budget": -1, "policy": "full", "position_mode": "absolute", "gamma": 0, "gamma_mode": "fixed",
        "refresh": 0, "temperature": 0.0, "seed": 42, "prompt_len": 40, "device": "cpu", "dtype": "float32",
        "status": "failed",
    }  # fmt: skip
    return {**dict.fromkeys(SAMPLES.names), **required, **changes}


def test_rows_come_back_as_they_were_written(tmp_path):
    rows = [target(), target(doc_id="e", target_ids=[], topk_ids=[], topk_logprobs=[])]
    assert write_rows(tmp_path / "part.parquet", rows, TARGETS) == 2
    back = read_rows(tmp_path / "part.parquet", TARGETS)
    assert [r["doc_id"] for r in back] == ["d", "e"]
    assert back[0]["topk_logprobs"][0] == pytest.approx([-0.1, -3.0], abs=1e-6)
    assert back[1]["target_ids"] == []


def test_types_are_the_schemas_even_where_a_whole_column_is_null(tmp_path):
    write_rows(tmp_path / "a.parquet", [sample()], SAMPLES)
    write_rows(tmp_path / "b.parquet", [sample(first_mismatch=3, accepted_at=[1, 0])], SAMPLES)
    for name in ("a", "b"):
        assert pq.read_schema(tmp_path / f"{name}.parquet").equals(SAMPLES)
    for order in (["a", "b"], ["b", "a"]):
        files = [str(tmp_path / f"{name}.parquet") for name in order]
        found = duckdb.sql(
            f"select max(first_mismatch), max(accepted_at), count(*) from read_parquet({files})"
        ).fetchall()
        assert found == [(3, [1, 0], 2)]


def test_an_unknown_key_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"row 1: missing \[\], unknown \['acceptance'\]"):
        write_rows(tmp_path / "a.parquet", [sample(), sample(acceptance=0.5)], SAMPLES)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_key_is_refused_by_name(tmp_path):
    row = sample()
    del row["accepted"]
    with pytest.raises(ValueError, match=r"row 0: missing \['accepted'\]"):
        write_rows(tmp_path / "a.parquet", [row], SAMPLES)


@pytest.mark.parametrize("field", ["run_key", "budget", "temperature", "status"])
def test_a_null_in_a_required_field_is_refused(tmp_path, field):
    with pytest.raises(ValueError, match=f"row 0: {field} is null; it is required"):
        write_rows(tmp_path / "a.parquet", [sample(**{field: None})], SAMPLES)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_are_refused(tmp_path, value):
    with pytest.raises(ValueError, match=r"row 0: distinct_4 = .*; write NULL for an undefined value"):
        write_rows(tmp_path / "a.parquet", [sample(distinct_4=value)], SAMPLES)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_no_numbers_are_refused_inside_lists_too(tmp_path, value):
    with pytest.raises(ValueError, match="topk_logprobs"):
        write_rows(tmp_path / "a.parquet", [target(topk_logprobs=[[-0.1, value], [-0.2, -2.0]])], TARGETS)


def test_a_value_of_another_type_is_refused():
    with pytest.raises((ValueError, TypeError)):
        to_table([sample(context="40")], SAMPLES)


def test_a_fraction_in_a_whole_number_column_is_refused_rather_than_cut():
    with pytest.raises((ValueError, TypeError)):
        to_table([sample(rounds=3.7)], SAMPLES)


def test_no_rows_are_a_file_of_no_rows(tmp_path):
    assert write_rows(tmp_path / "a.parquet", [], ROUNDS) == 0
    assert read_rows(tmp_path / "a.parquet", ROUNDS) == []


def test_a_cut_off_file_an_empty_one_and_one_of_another_table_count_as_damaged(tmp_path):
    path = tmp_path / "a.parquet"
    write_rows(path, [sample()], SAMPLES)
    whole = path.read_bytes()
    assert read_rows(path, ROUNDS) is None
    for damaged in (b"", whole[:100], whole[: len(whole) // 2], b"\0" * 100):
        path.write_bytes(damaged)
        assert read_rows(path, SAMPLES) is None
    assert read_rows(tmp_path / "absent.parquet", SAMPLES) is None


def test_writing_replaces_a_file_whole_and_leaves_nothing_beside_it(tmp_path):
    path = tmp_path / "deep" / "a.parquet"
    write_rows(path, [sample()], SAMPLES)
    write_rows(path, [sample(), sample(doc_id="e")], SAMPLES)
    assert [r["doc_id"] for r in read_rows(path, SAMPLES)] == ["d", "e"]
    assert [p.name for p in path.parent.iterdir()] == ["a.parquet"]


def test_files_are_zstd_in_small_row_groups(tmp_path):
    write_rows(tmp_path / "a.parquet", [target(doc_id=str(i)) for i in range(5)], TARGETS, row_group_size=2)
    meta = pq.ParquetFile(tmp_path / "a.parquet").metadata
    assert meta.num_row_groups == 3
    assert meta.row_group(0).column(0).compression == "ZSTD"
