"""Keys, manifests and atomic writes: what a crash leaves behind and what changes a name."""

import json
import os
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from bdcore import identity, keys
from bdcore.config import load_config
from bdcore.documents import Document, documents_key
from bdcore.identity import (
    MANIFEST,
    atomic_path,
    canonical_json,
    digest,
    exclusive,
    read_manifest,
    stage_key,
    staging,
    write_json,
    write_manifest,
)
from bdcore.keys import study_keys
from bdcore.models.shape import ModelShape
from bdcore.preflight import Inputs
from bdcore.runtime import Runtime, resolve
from bdcore.training.loop import draw
from tests.tiny import tiny_config


def names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_atomic_write_replaces_the_whole_file(tmp_path):
    path = tmp_path / "deep" / "value.txt"
    for text in ("a long first text", "short"):
        with atomic_path(path) as partial:
            partial.write_text(text)
    assert path.read_text() == "short" and names(path.parent) == ["value.txt"]


def test_failed_atomic_write_keeps_the_old_file_and_leaves_nothing(tmp_path):
    path = tmp_path / "value.txt"
    path.write_text("old")
    with pytest.raises(RuntimeError), atomic_path(path) as partial:
        partial.write_text("half")
        raise RuntimeError
    assert path.read_text() == "old" and names(tmp_path) == ["value.txt"]


def test_unfinished_file_is_invisible_under_the_final_name(tmp_path):
    path = tmp_path / "value.txt"
    with atomic_path(path) as partial:
        partial.write_text("half")
        assert not path.exists() and partial.name.startswith(".")


@pytest.fixture
def artifact(tmp_path):
    folder = tmp_path / "artifact"
    (folder / "inner").mkdir(parents=True)
    (folder / "rows.bin").write_bytes(b"12345")
    (folder / "inner" / "more.bin").write_bytes(b"67")
    write_manifest(folder, "abc", rows=2)
    return folder


def test_folder_without_manifest_is_not_done(tmp_path):
    (tmp_path / "rows.bin").write_bytes(b"1")
    assert read_manifest(tmp_path) is None and read_manifest(tmp_path / "absent") is None


def test_finished_artifact_states_its_key_files_and_facts(artifact):
    manifest = read_manifest(artifact)
    assert manifest is not None and manifest["key"] == "abc" and manifest["rows"] == 2
    assert manifest["files"] == {"rows.bin": 5, "inner/more.bin": 2}


@pytest.mark.parametrize("name", ["rows.bin", "inner/more.bin"])
def test_artifact_with_a_missing_or_resized_file_is_not_done(artifact, name):
    file = artifact / name
    whole = file.read_bytes()
    file.write_bytes(whole[:1])
    assert read_manifest(artifact) is None
    file.unlink()
    assert read_manifest(artifact) is None
    file.write_bytes(whole)
    assert read_manifest(artifact) is not None


@pytest.mark.parametrize("content", [b"", b"{", b"{}", b"[]", b"null", b'{"files": 3}', b"\xff\xfe"])
def test_damaged_manifest_means_not_done(artifact, content):
    (artifact / MANIFEST).write_bytes(content)
    assert read_manifest(artifact) is None


def test_half_written_files_of_a_killed_run_are_no_part_of_the_artifact(artifact):
    (artifact / ".rows.bin.123.partial").write_bytes(b"junk")
    assert list(write_manifest(artifact, "abc")["files"]) == ["inner/more.bin", "rows.bin"]


def test_staging_shows_the_old_folder_until_the_new_one_is_whole(artifact):
    with staging(artifact) as partial:
        (partial / "new.bin").write_bytes(b"1")
        assert (artifact / "rows.bin").exists() and not (artifact / "new.bin").exists()
    assert names(artifact) == ["new.bin"] and names(artifact.parent) == ["artifact"]


def test_failed_staging_keeps_the_old_folder_and_leaves_nothing(artifact):
    with pytest.raises(KeyboardInterrupt), staging(artifact) as partial:
        (partial / "new.bin").write_bytes(b"1")
        raise KeyboardInterrupt
    assert read_manifest(artifact) is not None and names(artifact.parent) == ["artifact"]


def test_staging_does_not_inherit_what_a_killed_run_left(artifact):
    left = artifact.with_name(f".{artifact.name}.partial")
    left.mkdir()
    (left / "junk").write_text("junk")
    with staging(artifact) as partial:
        assert names(partial) == []


def test_lock_lets_one_in_at_a_time_and_frees_on_error(tmp_path):
    inside, entered = [], threading.Event()

    def second():
        entered.set()
        with exclusive(tmp_path / "artifact"):
            inside.append("second")

    with pytest.raises(RuntimeError), exclusive(tmp_path / "artifact"):
        thread = threading.Thread(target=second)
        thread.start()
        entered.wait(5)
        thread.join(0.2)
        assert not inside
        raise RuntimeError
    thread.join(10)
    assert inside == ["second"]


def test_killed_owner_frees_the_lock(tmp_path):
    pid = os.fork()
    if pid == 0:  # the child takes the lock and dies without a word
        exclusive(tmp_path / "artifact").__enter__()
        os._exit(0)
    os.waitpid(pid, 0)
    done = threading.Event()

    def take():
        with exclusive(tmp_path / "artifact"):
            done.set()

    threading.Thread(target=take, daemon=True).start()
    assert done.wait(10)


def test_json_is_canonical_whatever_the_order(tmp_path):
    assert canonical_json({"b": 1, "a": [1, {"d": 2, "c": 3}]}) == canonical_json({"a": [1, {"c": 3, "d": 2}], "b": 1})
    write_json(tmp_path / "x.json", {"path": tmp_path})
    assert json.loads((tmp_path / "x.json").read_text()) == {"path": str(tmp_path)}
    with pytest.raises(TypeError):
        digest({1, 2})


def test_stage_key_changes_with_stage_config_inputs_and_code(monkeypatch):
    base = stage_key("targets", {"length": 1}, {"verifier": "a"})
    assert base == stage_key("targets", {"length": 1}, {"verifier": "a"})
    others = {
        stage_key("training", {"length": 1}, {"verifier": "a"}),
        stage_key("targets", {"length": 2}, {"verifier": "a"}),
        stage_key("targets", {"length": 1}, {"verifier": "b"}),
    }
    monkeypatch.setattr(identity, "code_fingerprint", lambda stage: "other code")
    others.add(stage_key("targets", {"length": 1}, {"verifier": "a"}))
    assert len(others) == 4 and base not in others


def test_code_fingerprint_sees_every_module_of_bdcore(monkeypatch):
    seen = []
    monkeypatch.setattr(identity, "file_digest", lambda path: seen.append(path) or "x")
    identity.code_fingerprint.__wrapped__()
    root = Path(identity.__file__).parent
    assert set(seen) == set(root.rglob("*.py"))


SHAPE = ModelShape(4, 64, 128, 4, 2, 16, 260, 512, 260)
RUNTIME = Runtime("cpu", "float32", "float32", "float32", "because")
STAGES = ["targets", "base", "trained", "run"]


@pytest.fixture
def made(tmp_path, monkeypatch):
    """Keys of the tiny study under overrides, as a dict."""
    monkeypatch.setattr(keys, "model_key", lambda model: digest("model", model.source, model.revision))
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(tiny_config(tmp_path / "verifier", tmp_path / "texts")))

    def keys_of(*overrides, runtime=RUNTIME, training="a", evaluation="b"):
        config = load_config(path, list(overrides))
        learned, measured = ([Document(name, "folder", name) for name in names] for names in (training, evaluation))
        return study_keys(config, runtime, Inputs(SHAPE, SHAPE, learned, [measured])).facts()

    return keys_of


def changed(before: dict, after: dict) -> list[str]:
    return [stage for stage in STAGES if before[stage] != after[stage]]


@pytest.mark.parametrize(
    ("override", "stages"),
    [
        ("targets.length=176", STAGES),
        ("verifier.source=other/model", STAGES),
        ("seed=2", STAGES),
        ("base.steps=5", ["base", "trained", "run"]),
        ("drafter.num_layers=2", ["base", "trained", "run"]),
        ("training.lam=0.25", ["trained", "run"]),
        ("training.views.budgets={32: 1}", ["trained", "run"]),
        ("grid.gammas=[5]", ["run"]),
        ("grid.corpus.split=train", ["run"]),
        ("name=renamed", []),
        ("tracking.enabled=false", []),
        ("tracking.experiment=other", []),
        ("runtime.threads=2", []),
        ("runtime.device=auto", []),
    ],
)
def test_keys_change_from_the_stage_on_that_a_setting_belongs_to(made, override, stages):
    assert changed(made(), made(override)) == stages


def test_keys_change_with_documents_device_and_arithmetic(made):
    before = made()
    assert changed(before, made(training="x")) == STAGES
    assert changed(made(training="ac"), made(training="ca")) == STAGES, "prompts are drawn in this order"
    assert changed(before, made(evaluation="x")) == ["run"]
    assert changed(before, made(runtime=replace(RUNTIME, dtype="bfloat16"))) == STAGES
    assert changed(before, made(runtime=replace(RUNTIME, training_dtype="bfloat16"))) == ["base", "trained", "run"]
    assert changed(before, made(runtime=replace(RUNTIME, grid_dtype="bfloat16"))) == ["run"]
    assert changed(before, made(runtime=replace(RUNTIME, reason="other words"))) == []


def test_pretrained_drafter_is_keyed_by_its_content(made, monkeypatch):
    overrides = ("base=null", "drafter={kind: pretrained, source: /models/drafter}")
    before = made(*overrides)
    edited = {"/models/drafter": "edited"}
    monkeypatch.setattr(keys, "model_key", lambda m: digest(edited.get(m.source, "model"), m.source, m.revision))
    assert changed(before, made(*overrides)) == ["base", "trained", "run"]


def test_order_of_weights_changes_neither_key_nor_draws(made, tmp_path):
    forward, backward = "training.views.budgets={32: 1, 48: 2}", "training.views.budgets={48: 2, 32: 1}"
    assert made(forward) == made(backward)
    stages = [load_config(tmp_path / "tiny.yaml", [o]).training for o in (forward, backward)]
    assert [draw(stages[0], 1, s) for s in range(50)] == [draw(stages[1], 1, s) for s in range(50)]


def test_runtime_says_why(tmp_path):
    config = load_config(Path(__file__).parents[2] / "configs" / "quick.yaml", ["runtime.device=cpu"])
    runtime = resolve(config.runtime)
    assert runtime.device == "cpu" and runtime.grid_dtype == "float32" and "configured" in runtime.reason


def test_settings_that_came_later_leave_the_keys_of_the_cpu_study_alone():
    """What its stages hash: hours of targets and training hang on it. A new setting must leave itself out of the dump
    at its default."""
    config = load_config(Path(__file__).parents[2] / "configs" / "cpu.yaml")
    sections = {name: digest(getattr(config, name)) for name in ("targets", "drafter", "base", "training", "grid")}
    assert sections == {
        "targets": "a544118b00d9",
        "drafter": "0e35f6d23748",
        "base": "d7391daa72ea",
        "training": "237b061272e6",
        "grid": "3cba933b2d9f",
    }
    documents = [Document("a", "stdlib", "text"), Document("b", "lwm", "text", "why?")]
    assert documents_key(documents) == "ea0ef7e8b3eb"


def test_a_stage_depends_on_the_code_it_runs(monkeypatch):
    def changed(name):
        monkeypatch.setattr(identity, "file_digest", lambda p: "new" if p.as_posix().endswith(name) else "old")
        return [identity.code_fingerprint.__wrapped__(s) for s in ("targets", "base", "training", "evaluation", None)]

    none = changed("nothing")
    differ = {
        name: [a != b for a, b in zip(changed(name), none, strict=True)]
        for name in ("bdcore/kv/selection.py", "bdcore/training/loop.py", "bdcore/decoding/accept.py")
    }
    assert differ["bdcore/kv/selection.py"] == [True] * 5
    assert differ["bdcore/training/loop.py"] == [False, True, True, False, True]
    assert differ["bdcore/decoding/accept.py"] == [False, False, False, True, True]
    assert [a != b for a, b in zip(changed("collapse/verdicts.py"), none, strict=True)] == [False] * 4 + [True]


def test_code_that_a_stage_leaves_out_is_not_imported_by_what_it_runs():
    """The fingerprint may only leave out what the stage's own code never reaches."""
    root = Path(identity.__file__).parent
    for entry, left_out in (
        ("targets", ("training", "evaluation", "decoding")),
        ("training", ("evaluation", "decoding")),
    ):
        for path in (root / entry).rglob("*.py"):
            text = path.read_text()
            assert not any(f"bdcore.{name}" in text.replace(f"bdcore.{entry}", "") for name in left_out), path
