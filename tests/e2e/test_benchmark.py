"""The benchmark of the decoder runs on tiny random models, and says what it must."""

import json
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from benchmarks.report_scale import RUN, make_workspace
from reports.build import build_report
from reports.tables import query


@pytest.mark.slow
def test_the_decoding_benchmark_ends_with_its_ratios_and_leaves_rows_and_a_figure(tmp_path):
    command = [sys.executable, "benchmarks/decoding.py", "--pair", "tiny", "--quick", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    result = json.loads(done.stdout.splitlines()[-1])
    wanted = {"ar_vs_generate", "verify5_vs_1", "sd_vs_assisted", "overhead_share", "draft_step_8k_vs_1k"}
    assert wanted <= set(result)
    for name in wanted:
        assert set(result[name]) == {"float32", "bfloat16"}
        for by_context in result[name].values():
            assert set(by_context) <= {"300", "600"} and all(value > 0 for value in by_context.values())
    rows = pq.read_table(tmp_path / "decoding.parquet").to_pylist()
    fp32 = [r for r in rows if r["kind"] == "run" and r["dtype"] == "float32"]
    assert {r["system"] for r in fp32} == {"generate", "ar", "assisted", "sd_full", "lookup", "budgetdraft"}
    assert all(r["equal"] for r in fp32), "every system writes the same text"
    sparse = {r["drafter_kv_bytes"] for r in rows if r["system"] == "budgetdraft" and r["dtype"] == "float32"}
    assert len(sparse) == 1, "a sparse cache takes the same memory at every context"
    assert (tmp_path / "decoding.svg").read_text().startswith("<svg")


def test_the_scale_benchmark_writes_what_the_grid_writes(tmp_path):
    """Its rows pass the schema of today, and its totals and rounds agree."""
    make_workspace(tmp_path, 100)
    samples = query(tmp_path, "SELECT sum(rounds)::BIGINT, sum(accepted)::BIGINT, sum(drafted)::BIGINT FROM samples")
    rounds = query(tmp_path, "SELECT count(*), sum(accepted)::BIGINT, sum(drafted)::BIGINT FROM rounds")
    assert samples[1] == rounds[1]
    page = build_report(tmp_path, RUN, tmp_path / "out", facts={})["report.html"].read_text()
    assert "Where in a round drafts die" in page
