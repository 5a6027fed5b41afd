"""What to deploy from the rows of a workspace: whose rows count, what engines are told, and the command."""

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

from bdcore.collapse.recommend import recommend
from bdcore.decoding.lookup import Lookup
from bdcore.decoding.methods import METHODS
from bdcore.identity import write_manifest
from bdcore.workspace import Workspace
from flows.cli import app
from reports.deployment import as_json, as_text, recommended
from reports.engines import engines
from tests.unit.test_recommend import FULL, GRID, MIB, SPARSE, option
from tests.unit.test_reports import replayed, sample, store

OTHER = "ba9876543210"


# --- engines


def flags(setting):
    return engines(recommend([option(setting, 1024, 1.2, 1.3)], context=1024, memory=MIB * 100))


def speculative(told):
    return json.loads(told["vllm"]["flags"].split("--speculative-config ")[1].strip("'"))


def test_engines_get_the_flags_they_honour_and_hear_what_they_cannot_do():
    found = recommend(GRID, context=4096, memory=10 * MIB)
    told = engines(found)
    assert speculative(told) == {"method": "draft_model", "model": "DRAFTER", "num_speculative_tokens": 4}
    assert "--speculative-num-steps 4" in told["sglang"]["flags"]
    assert "--speculative-num-draft-tokens 5" in told["sglang"]["flags"]
    for engine in told.values():
        assert any("budget of 256 keys" in note for note in engine["notes"])
        assert any("in_cache positions" in note for note in engine["notes"])
    assert all(not engine["notes"] for engine in flags(FULL).values())
    assert json.loads(as_json(found))["option"]["setting"]["budget"] == 256
    assert "sglang:" in as_text(found) and found.sentences[0] in as_text(found)


def test_no_engine_is_told_to_run_a_method_that_it_lacks():
    for method in METHODS.values():
        if method.alone or method.lookup:
            continue
        told = flags(replace(SPARSE if method.sparse else FULL, method=method.name))
        runs = method.drafter in ("base", "trained") and not method.two_levels
        assert set(told) == {"vllm", "sglang"}
        assert all((engine["flags"] is not None) == runs for engine in told.values()), method.name
    told = flags(replace(SPARSE, method="self_sparse", drafter="self"))
    assert all("no flags: it cannot let the verifier draft for itself" in e["notes"][0] for e in told.values())
    found = recommend([option(replace(SPARSE, method="triforce"), 1024, 1.2, 1.3)], context=1024, memory=MIB * 100)
    assert "DRAFTER" not in as_text(found) and "None" not in as_text(found) and "two levels" in as_text(found)
    assert any("transformers" in note for note in flags(replace(FULL, method="hf_assisted"))["vllm"]["notes"])


def test_a_lookup_is_told_to_match_as_it_was_measured():
    """Left alone, vLLM's shortest match is its longest."""
    told = flags(replace(FULL, method="ngram", drafter=None))
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": Lookup().longest}
    assert speculative(told) == {"method": "ngram", "num_speculative_tokens": 2, **lookup}
    assert told["sglang"]["flags"] is None and "another method" in told["sglang"]["notes"][0]


# --- rows


def timed(corpus="stdlib", seconds=1.0, **changes):
    """Four prompts of a drafter; `ar` took 2 s of each."""
    return [sample(corpus=corpus, doc=doc, decode_s=seconds + 0.01 * doc, **changes) for doc in range(4)]


def advice(workspace, **asked):
    return recommended(workspace, context=1024, memory=MIB * 100, **asked)


def test_the_scene_of_the_rows_decides_unless_one_is_named(tmp_path):
    sampled = {"workload": "sampled", "temperature": 0.8, "seconds": 1.5}
    store(tmp_path, [*timed(seconds=0.8), *timed("pg19", 4.0), *timed(**sampled), *[replayed(doc=d) for d in range(4)]])
    found = advice(tmp_path)
    assert found.status == "off" and found.option.scene.corpus == "pg19" and len(found.others) == 2
    told = json.loads(as_json(found))
    assert told["option"]["scene"] == {"corpus": "pg19", "workload": "greedy", "temperature": 0.0}
    assert advice(tmp_path, corpus="stdlib").option.scene.workload == "sampled"
    assert advice(tmp_path, corpus="stdlib", workload="greedy").option.speedup.value == pytest.approx(8 / 3.26)
    assert advice(tmp_path, temperature=0.8).option.scene.temperature == 0.8
    with pytest.raises(ValueError, match="corpus = books: no timed rows of it; found pg19, stdlib"):
        advice(tmp_path, corpus="books")
    with pytest.raises(ValueError, match="workload = replay: no timed rows of it; found greedy, sampled"):
        advice(tmp_path, workload="replay")


def finished(workspace, run, verifier, study):
    directory = Workspace(workspace).samples(run)
    write_manifest(directory, run, study=study, inputs={"verifier": verifier})


def test_runs_of_two_verifiers_are_refused_with_the_remedy(tmp_path):
    for run, verifier, study in (("0123456789ab", "v0", "small"), (OTHER, "v1", "large")):
        store(tmp_path, timed(run_key=run, drafter_key=f"d-{run}"))
        finished(tmp_path, run, verifier, study)
    with pytest.raises(ValueError, match="different verifiers") as caught:
        advice(tmp_path)
    for part in ("run 0123456789ab (study small, verifier v0)", f"run {OTHER} (study large, verifier v1)", "--run"):
        assert part in str(caught.value)
    assert advice(tmp_path, run_key=OTHER).status == "on"


def test_runs_of_one_verifier_are_read_together(tmp_path):
    for run, seconds in (("0123456789ab", 0.8), (OTHER, 4.0)):
        store(tmp_path, timed(run_key=run, seconds=seconds))
        finished(tmp_path, run, "v0", "study")
    found = advice(tmp_path)
    assert (found.status, found.option.run) == ("off", OTHER)


def test_the_verifier_of_an_unfinished_run_is_told_by_its_drafters(tmp_path):
    own = {"drafter_name": "trained", "drafter_key": "d7"}
    store(tmp_path, timed(**own))
    finished(tmp_path, "0123456789ab", "v0", "study")
    store(tmp_path, timed(run_key=OTHER, **own))
    assert advice(tmp_path).status == "on"
    itself = {"method": "self_sparse", "drafter_name": "self", "drafter_key": "v1"}
    store(tmp_path, timed(run_key="00000000000a", **itself))
    with pytest.raises(ValueError, match=r"run 00000000000a \(verifier v1\)"):
        advice(tmp_path)
    store(tmp_path, timed(run_key="00000000000a"))  # by a drafter that could be anyone's
    with pytest.raises(ValueError, match="verifier not known: unfinished"):
        advice(tmp_path)


def test_a_run_without_times_does_not_stand_in_the_way(tmp_path):
    store(tmp_path, timed())
    finished(tmp_path, "0123456789ab", "v0", "study")
    store(tmp_path, [replayed(run_key=OTHER, doc=doc) for doc in range(4)])
    assert advice(tmp_path).status == "on"


# --- the command


def test_the_command_takes_a_scene_and_a_run(tmp_path, monkeypatch):
    monkeypatch.setenv("BUDGETDRAFT_HOME", str(tmp_path))
    store(tmp_path, [*timed(seconds=0.8), *timed("pg19", 4.0)])
    command = ["recommend", "--context", "1024", "--json"]
    named = CliRunner().invoke(app, [*command, "--corpus", "stdlib", "--run", "0123456789ab"])
    assert named.exit_code == 0 and json.loads(named.stdout)["status"] == "on"
    assert json.loads(CliRunner().invoke(app, command).stdout)["status"] == "off"
    wrong = CliRunner().invoke(app, [*command, "--corpus", "books"])
    assert wrong.exit_code == 2 and "found pg19, stdlib" in wrong.stderr and wrong.stderr.count("\n") == 1
    both = CliRunner().invoke(app, [*command, "--run", "0123456789ab", "--config", "configs/quick.yaml"])
    assert both.exit_code == 2 and "give one of them" in both.stderr
