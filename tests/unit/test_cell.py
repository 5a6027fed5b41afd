"""One prompt under every cell: rows of the tables, measured against `ar`, and what a failing cell leaves."""

import dataclasses

import pytest

from bdcore.config import Config, GridConfig
from bdcore.decoding.decoder import mismatch_kind
from bdcore.decoding.methods import METHODS
from bdcore.decoding.records import Decoded
from bdcore.documents import Prompt
from bdcore.evaluation import cell as cell_module
from bdcore.evaluation.cell import cache_plan, measure_prompt
from bdcore.evaluation.grid import cells
from bdcore.evaluation.rows import Bench
from bdcore.kv.budget import FULL
from bdcore.models.drafter import Drafter
from bdcore.schema import ROUNDS, SAMPLES, to_table
from tests.conftest import tiny_llama


class Tokenizer:
    def decode(self, ids):
        return " ".join(map(str, ids))


class Broken:
    """A drafter's model that raises after so many forwards."""

    def __init__(self, model, after):
        self.config, self.model, self.device = model.config, model.model, model.device
        self.whole, self.left = model, after

    def __call__(self, *args, **kwargs):
        self.left -= 1
        if self.left < 0:
            raise RuntimeError("out of memory:\n tried to allocate 3 GiB")
        return self.whole(*args, **kwargs)


def config(**changes):
    grid = {"contexts": [40], "budgets": [32, "full"], "gammas": [2, 4], "prompts": 1, "new_tokens": 12, **changes}
    return Config(grid=GridConfig(**grid))


@pytest.fixture
def bench(verifier, twin, noisy):
    def make(base=noisy, trained=twin, eos=frozenset(), **changes):
        return Bench(
            run_key="run",
            config=config(**changes),
            verifier=verifier,
            tokenizer=Tokenizer(),
            drafters={"base": base, "trained": trained, "self": Drafter(verifier, None)},
            drafter_keys={"base": "key-b", "trained": "key-t", "self": "key-v"},
            eos=eos,
            device="cpu",
            dtype="float32",
        )

    return make


@pytest.fixture
def document(prompt):
    return Prompt("doc", "stdlib", 0, prompt(40), truncated=True)


def measured(bench, document):
    every = cells(bench.config.grid)
    samples, rounds = measure_prompt(bench, document, every)
    return every, samples, rounds


def test_every_cell_is_one_sample_row_that_fits_the_table(bench, document):
    every, samples, rounds = measured(bench(), document)
    assert [s["cell_key"] for s in samples] == [c.key for c in every]
    assert to_table(samples, SAMPLES).num_rows == len(every) == 9
    assert to_table(rounds, ROUNDS).num_rows == len(rounds)
    assert {s["status"] for s in samples} == {"ok"}


def test_every_method_gives_the_text_of_ar_and_says_so(bench, document):
    _, samples, _ = measured(bench(), document)
    assert {tuple(s["output_ids"]) for s in samples} == {tuple(samples[0]["output_ids"])}
    assert all(s["exact_match"] and s["first_mismatch"] is None and s["mismatch_gap"] is None for s in samples)
    assert {s["new_tokens"] for s in samples} == {12}
    assert {s["finish_reason"] for s in samples} == {"length"}
    assert samples[0]["output_text"] == " ".join(map(str, samples[0]["output_ids"]))


def test_ar_has_no_drafter_no_drafts_and_is_its_own_baseline(bench, document):
    _, samples, _ = measured(bench(), document)
    ar = samples[0]
    assert (ar["method"], ar["drafter_key"], ar["drafter_name"]) == ("ar", None, None)
    assert (ar["gamma"], ar["drafted"], ar["accepted"], ar["rounds"]) == (0, 0, 0, 11)
    assert (ar["budget"], ar["policy"], ar["drafter_kv_bytes_peak"]) == (FULL, "full", 0)
    assert (ar["ar_wall_s"], ar["ar_decode_s"]) == (ar["wall_s"], ar["decode_s"])


def test_a_cell_is_compared_with_the_mean_of_ar_before_and_after_it(bench, document, monkeypatch):
    """`ar` is timed 1, 2, 3, ... seconds; with ar_every = 2 it runs again after every second cell and at the end."""
    real, timed = cell_module.decode, []

    def clocked(start, drafter, *args, **kwargs):
        decoded = real(start, drafter, *args, **kwargs)
        if drafter is None:
            timed.append(float(len(timed) + 1))
        return dataclasses.replace(decoded, decode_s=timed[-1] if drafter is None else 0.5)

    monkeypatch.setattr(cell_module, "decode", clocked)
    _, samples, _ = measured(bench(ar_every=2, methods=["ar", "sd_full", "budgetdraft"]), document)
    assert len(samples) == 7 and timed == [1.0, 2.0, 3.0, 4.0]
    assert [s["ar_decode_s"] for s in samples] == [1.0, 1.5, 1.5, 2.5, 2.5, 3.5, 3.5]
    assert all(s["ar_wall_s"] == samples[0]["prefill_s"] + s["ar_decode_s"] for s in samples)


def test_sampled_text_is_drawn_at_its_temperature_and_not_compared(bench, document):
    found = bench(workloads=["greedy", "sampled"], temperatures=[0.7, 5.0], methods=["ar", "budgetdraft"])
    _, samples, rounds = measured(found, document)
    assert [s["temperature"] for s in samples if s["method"] == "ar"] == [0.0, 0.7, 5.0]
    sampled = [s for s in samples if s["workload"] == "sampled"]
    assert len(sampled) == 2 * 5
    assert all(s["exact_match"] is s["first_mismatch"] is s["mismatch_kind"] is None for s in sampled)
    texts = {(s["temperature"]): s["output_ids"] for s in samples if s["method"] == "ar"}
    assert len({tuple(ids) for ids in texts.values()}) == 3
    assert measured(found, document)[1][-1]["output_ids"] == samples[-1]["output_ids"]
    to_table(samples, SAMPLES), to_table(rounds, ROUNDS)


def test_accepted_drafts_are_marked_in_the_text(bench, document):
    _, samples, rounds = measured(bench(gammas=[2], methods=["ar", "budgetdraft", "sd_sparse"]), document)
    for s in samples:
        marked = "".join(s["output_text"][a:b] for a, b in zip(*[iter(s["accepted_spans"])] * 2, strict=True))
        words, at = [], 1  # the first token is the verifier's
        for r in (r for r in rounds if r["cell_key"] == s["cell_key"]):
            words += s["output_ids"][at : at + r["accepted"]]
            at += r["emitted"]
        assert marked.split() == [str(i) for i in words]
        assert (s["accepted_spans"] == []) == (s["accepted"] == 0)


def test_the_verifier_drafts_for_itself(bench, document, verifier):
    found = bench(methods=["ar", "self_sparse"], budgets=[32], gammas=[2])
    drafters = {**found.drafters, "self": Drafter(verifier, None)}
    keys = {**found.drafter_keys, "self": "key-v"}
    found = dataclasses.replace(found, drafters=drafters, drafter_keys=keys)
    _, samples, _ = measured(found, document)
    assert samples[1]["drafter_key"] == "key-v" and samples[1]["exact_match"] and samples[1]["accepted"] > 0


def test_warm_up_decodes_once_with_every_drafter_and_never_fails(bench, document, noisy, monkeypatch):
    used = []
    real = cell_module.decode
    monkeypatch.setattr(
        cell_module, "decode", lambda s, d, *a, **k: used.append((d, k["new_tokens"])) or real(s, d, *a, **k)
    )
    found = bench(base=Drafter(Broken(noisy.model, 0), None))
    cell_module.warm_up(found, document, cells(found.config.grid))
    assert [d for d, _ in used] == [None, found.drafters["base"], found.drafters["trained"]]
    assert {n for _, n in used} == {2}


def test_each_method_runs_its_own_drafter(bench, document):
    _, samples, _ = measured(bench(), document)
    assert {(s["method"], s["drafter_key"], s["drafter_name"]) for s in samples[1:]} == {
        ("sd_full", "key-b", "base"),
        ("sd_sparse", "key-b", "base"),
        ("budgetdraft", "key-t", "trained"),
    }
    twin = [s for s in samples if s["method"] == "budgetdraft" and s["budget"] == FULL]
    assert all(s["accepted"] == s["drafted"] > 0 for s in twin)


def test_sums_over_round_rows_are_the_sample_rows(bench, document):
    _, samples, rounds = measured(bench(), document)
    for s in samples:
        mine = [r for r in rounds if r["cell_key"] == s["cell_key"]]
        assert [r["round"] for r in mine] == list(range(s["rounds"]))
        for name in ("drafted", "accepted"):
            assert sum(r[name] for r in mine) == s[name] == sum(s[f"{name}_at"])
        assert sum(r["emitted"] for r in mine) == s["new_tokens"] - 1
        for name in ("draft_s", "select_s", "verify_s", "overhead_s"):
            assert sum(r[name] for r in mine) == pytest.approx(s[name])


def test_the_cached_peak_is_within_budget_gamma_and_one_and_bytes_are_the_buffers(bench, document):
    _, samples, rounds = measured(bench(), document)
    for s in samples:
        if s["budget"] == 32:
            assert s["drafter_cached_peak"] <= 32 + s["gamma"] + 1
            assert s["drafter_kv_bytes_peak"] == 2 * 2 * 2 * (32 + s["gamma"] + 1) * 16 * 4
    assert all(r["drafter_cached"] <= 32 for r in rounds if r["budget"] == 32)


def test_eos_ends_every_method_alike(bench, document):
    free = measured(bench(), document)[1][0]["output_ids"]
    _, samples, _ = measured(bench(eos={free[6]}), document)
    assert {s["finish_reason"] for s in samples} == {"eos"}
    assert all(s["exact_match"] for s in samples)
    assert samples[0]["output_ids"][-1] == free[6]


@pytest.mark.parametrize("after", [0, 6])  # at once; or in a later round, with drafts in the verifier's cache
def test_a_failed_cell_is_a_row_that_says_why_and_the_others_are_measured(bench, document, noisy, after):
    every, samples, rounds = measured(bench(base=Drafter(Broken(noisy.model, after), None)), document)
    failed = [s for s in samples if s["status"] == "failed"]
    assert {s["method"] for s in failed} == {"sd_full", "sd_sparse"}
    for s in failed:
        assert s["error"].startswith("RuntimeError: out of memory: tried to allocate 3 GiB (")
        assert "\n" not in s["error"]
        assert s["accepted"] is s["drafted"] is s["output_ids"] is s["exact_match"] is None
    good = [s for s in samples if s["status"] == "ok"]
    assert {s["method"] for s in good} == {"ar", "budgetdraft"}
    assert all(s["exact_match"] and s["error"] is None for s in good)
    assert len(samples) == len(every) == len({s["cell_key"] for s in samples})
    assert not {r["cell_key"] for r in rounds} & {s["cell_key"] for s in failed}
    to_table(samples, SAMPLES)


def test_without_ar_nothing_is_compared(bench, document, monkeypatch):
    """`ar` fails, the others have nothing to be measured against: all are rows, all failed."""
    real = cell_module.decode

    def failing(start, drafter, *args, **kwargs):
        if drafter is None:
            raise MemoryError("no room")
        return real(start, drafter, *args, **kwargs)

    monkeypatch.setattr(cell_module, "decode", failing)
    _, samples, rounds = measured(bench(), document)
    assert {s["status"] for s in samples} == {"failed"}
    assert samples[0]["error"].startswith("MemoryError: no room")
    assert all("`ar` failed on this prompt" in s["error"] for s in samples[1:])
    assert rounds == []


def test_a_prompt_the_verifier_cannot_hold_fails_every_cell_by_name(bench, document):
    short = dataclasses.replace(bench(), verifier=tiny_llama(max_positions=32))
    _, samples, _ = measured(short, document)
    assert {s["status"] for s in samples} == {"failed"}
    assert all("beyond the model's 32" in s["error"] for s in samples)


def test_a_mismatch_is_placed_and_its_gap_is_that_of_the_verifier_alone(bench, document, monkeypatch):
    real = cell_module.decode

    def wrong_at_5(start, drafter, *args, **kwargs):
        decoded = real(start, drafter, *args, **kwargs)
        if drafter is None:
            return decoded
        tokens = [*decoded.tokens[:5], decoded.tokens[5] + 1, *decoded.tokens[6:]]
        return Decoded(**{**vars(decoded), "tokens": tokens})

    monkeypatch.setattr(cell_module, "decode", wrong_at_5)
    gaps = []
    row = cell_module.decoded_row
    monkeypatch.setattr(cell_module, "decoded_row", lambda *a, **k: gaps.append(a[4].gaps[5]) or row(*a, **k))
    _, samples, _ = measured(bench(), document)
    assert samples[0]["exact_match"]
    for s in samples[1:]:
        assert (s["exact_match"], s["first_mismatch"], s["mismatch_gap"]) == (False, 5, gaps[0])


def test_cells_are_told_as_they_end_in_order(bench, document):
    told, ready = [], bench()
    every = cells(ready.config.grid)
    measure_prompt(ready, document, every, on_cell=told.append)
    assert told == every


def test_cells_in_another_order_give_the_same_rows(bench, document):
    """Each cell starts from the prompt as it was read, whatever ran before it."""

    def untimed(rows):
        kept = [{k: v for k, v in row.items() if not k.endswith("_s")} for row in rows]
        return sorted(kept, key=lambda row: (row["cell_key"], row.get("round", 0)))

    ready = bench(methods=list(METHODS))
    first, *others = cells(ready.config.grid)
    assert {cell.method for cell in (first, *others)} == set(METHODS)
    there, back = (measure_prompt(ready, document, [first, *order]) for order in (others, others[::-1]))
    assert len(there[0]) == len(others) + 1 and {row["status"] for row in there[0]} == {"ok"}
    for mine, theirs in zip(there, back, strict=True):
        assert untimed(mine) == untimed(theirs)


def test_cells_kept_from_an_earlier_run_are_not_measured_again(bench, document):
    ready, told, batches = bench(ar_every=2), [], []
    every = cells(ready.config.grid)
    whole = measure_prompt(ready, document, every, on_rows=batches.append)
    assert len(batches) > 1  # rows are final when `ar` has been timed after them, and told then
    assert ([r for b in batches for r in b[0]], [r for b in batches for r in b[1]]) == whole
    kept = {row["cell_key"] for row in batches[0][0]}
    samples, rounds = measure_prompt(ready, document, every, kept=kept, on_cell=told.append)
    assert {row["cell_key"] for row in samples} == {cell.key for cell in every} - kept
    assert {row["cell_key"] for row in rounds} <= {row["cell_key"] for row in samples}
    before = {row["cell_key"]: row["output_ids"] for row in whole[0]}
    assert all(row["output_ids"] == before[row["cell_key"]] and row["exact_match"] for row in samples)
    assert sorted(cell.key for cell in told) == sorted(cell.key for cell in every)
    assert measure_prompt(ready, document, every, kept={cell.key for cell in every}) == ([], [])


def test_ar_must_come_first(bench, document):
    ready = bench()
    with pytest.raises(AssertionError, match="ar comes first"):
        measure_prompt(ready, document, cells(ready.config.grid)[1:])


def test_the_cache_of_a_cell_is_the_grids_rule(bench):
    ready = config(policy="sink_recent", position_mode="in_cache", prefill_chunk=64, sinks=4)
    plan = cache_plan(ready, budget=32, policy="sink_recent", position_mode="in_cache")
    assert (plan.budget, plan.position_mode, plan.prefill_chunk, plan.extrapolate) == (32, "in_cache", 64, True)
    assert (plan.selection.policy, plan.selection.chunk, plan.selection.sinks) == ("sink_recent", 8, 4)


def test_positions_beyond_a_drafter_are_a_failed_cell_when_extrapolation_is_refused(bench, document, noisy):
    short = Drafter(tiny_llama(max_positions=32), None)
    refusing = bench(base=short)
    drafter = refusing.config.drafter.model_copy(update={"beyond_positions": "refuse"})
    refusing = dataclasses.replace(refusing, config=refusing.config.model_copy(update={"drafter": drafter}))
    _, samples, _ = measured(refusing, document)
    assert {s["status"] for s in samples if s["drafter_name"] == "base"} == {"failed"}
    assert all("beyond the model's 32" in s["error"] for s in samples if s["drafter_name"] == "base")
    _, samples, _ = measured(bench(base=short), document)
    assert {s["status"] for s in samples} == {"ok"}


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "oracle"},
        {"policy": "attention_ahead"},
        {"policy": "retrieval"},
        {"policy": "retrieval_ahead"},
        {"refresh": 2},
        {"gamma_mode": "confidence", "confidence": 0.3},
        {"gamma_mode": "adaptive"},
    ],
)
def test_each_option_of_the_grid_is_in_its_rows_and_changes_no_text(bench, document, changes):
    _, samples, rounds = measured(bench(new_tokens=24, **changes), document)
    assert to_table(samples, SAMPLES).num_rows == 9
    assert all(s["status"] == "ok" and s["exact_match"] for s in samples)
    sparse = [s for s in samples if s["budget"] == 32]
    assert {s["policy"] for s in sparse} == {changes.get("policy", "attention_mass")}
    assert {s["refresh"] for s in sparse} == {changes.get("refresh", 0)}
    drafting = [s for s in samples if s["method"] != "ar"]
    assert {s["gamma_mode"] for s in drafting} == {changes.get("gamma_mode", "fixed")}
    lengths = {r["drafted"] for r in rounds if r["method"] == "sd_sparse" and r["gamma"] == 4}
    assert len(lengths) > 1 or "gamma_mode" not in changes, "the draft length varies"


def test_rows_tell_how_far_back_the_evidence_of_a_needle_lies(bench, document):
    _, found, _ = measured(bench(methods=["ar"]), dataclasses.replace(document, evidence_distance=23))
    _, none, _ = measured(bench(methods=["ar"]), document)
    assert [row["evidence_distance"] for row in (*found, *none)] == [23, None]


def test_lookup_is_measured_against_ar_without_a_drafter_or_a_cache(bench, document):
    every, samples, rounds = measured(bench(methods=["ar", "ngram"], new_tokens=60), document)
    assert [(c.method, c.gamma) for c in every] == [("ar", 0), ("ngram", 2), ("ngram", 4)]
    assert to_table(samples, SAMPLES).num_rows == 3 and to_table(rounds, ROUNDS).num_rows == len(rounds)
    for s in samples[1:]:
        assert s["exact_match"] and s["new_tokens"] == 60 and s["drafted"] > 0
        assert (s["drafter_key"], s["drafter_name"], s["budget"], s["policy"]) == (None, None, FULL, "full")
        assert (s["drafter_cached_peak"], s["drafter_kv_bytes_peak"]) == (0, 0)


def test_cells_of_several_policies_and_modes_say_which_they_are(bench, document):
    settings = {"policy": ["sink_recent", "oracle"], "position_mode": ["absolute", "in_cache"], "gammas": [2]}
    _, samples, _ = measured(bench(**settings), document)
    assert all(s["status"] == "ok" and s["exact_match"] for s in samples)
    for method, full in (("sd_sparse", []), ("budgetdraft", [("full", "absolute")])):
        found = [(s["policy"], s["position_mode"]) for s in samples if s["method"] == method]
        assert found == [(p, m) for p in settings["policy"] for m in settings["position_mode"]] + full


def test_rows_name_the_corpus_of_their_prompt(bench, document):
    other = dataclasses.replace(document, source="pg19")
    assert {s["corpus"] for s in measured(bench(), other)[1]} == {"pg19"}


@pytest.mark.parametrize(("steps", "kind"), [(0.0, "tie"), (2.0, "tie"), (2.01, "bug"), (None, "bug")])
def test_a_mismatch_within_two_rounding_steps_is_a_tie_and_any_other_a_bug(steps, kind):
    assert mismatch_kind(steps) == kind
