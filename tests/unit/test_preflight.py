"""What is known before any weight is read: positions, layers, documents. Each fault is one line, nothing is written."""

from pathlib import Path

import pytest
import yaml

from bdcore.config import ConfigError, load_config
from bdcore.models import loading
from bdcore.preflight import check, inputs
from tests.conftest import tiny_llama
from tests.tiny import TEXTS, tiny_config, write_corpus, write_verifier


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    config = tiny_config(write_verifier(folder / "verifier"), write_corpus(folder / "texts"))
    (folder / "tiny.yaml").write_text(yaml.safe_dump(config))
    return folder


@pytest.fixture(autouse=True)
def no_weights(monkeypatch, tmp_path):
    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(loading, "load_model", refuse)
    monkeypatch.setattr("transformers.AutoModelForCausalLM.from_pretrained", refuse)
    monkeypatch.setenv("BUDGETDRAFT_HOME", str(tmp_path / "home"))


def tree(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}


def refusal(folder: Path, *overrides: str) -> str:
    before = tree(folder)
    with pytest.raises(ConfigError) as caught:
        inputs(load_config(folder / "tiny.yaml", list(overrides)))
    assert "\n" not in str(caught.value) and tree(folder) == before
    return str(caught.value)


def test_good_study_passes_with_its_shapes_and_disjoint_documents(folder, tmp_path):
    found = inputs(load_config(folder / "tiny.yaml"))
    assert (found.verifier.layers, found.verifier.positions, found.verifier.vocab) == (4, 512, 260)
    assert (found.drafter.layers, found.drafter.positions, found.drafter.head_rows) == (3, 128, 128)
    assert not {d.doc_id for d in found.training} & {d.doc_id for d in found.evaluation}
    assert len(found.training) + len(found.evaluation) == TEXTS
    assert not (tmp_path / "home").exists()


def test_context_beyond_the_verifiers_positions_names_the_longest_legal_one(folder):
    text = refusal(folder, "grid.contexts=[64, 501]")
    assert "grid.contexts = 501" in text and "512 positions" in text and "500" in text
    check(load_config(folder / "tiny.yaml", ["grid.contexts=[64, 500]"]))


def test_targets_beyond_the_verifiers_positions_are_refused(folder):
    assert "targets.length = 513" in refusal(folder, "targets.length=513")
    text = refusal(folder, "targets.prompt_tokens=400", "targets.new_tokens=113")
    assert "targets.prompt_tokens + targets.new_tokens = 513" in text and "512" in text


def test_more_log_probabilities_than_the_verifier_has_ids_are_refused(folder):
    text = refusal(folder, "targets.top_k=261")
    assert "targets.top_k = 261" in text and "vocabulary of 260 ids" in text and "at most 260" in text
    check(load_config(folder / "tiny.yaml", ["targets.top_k=260"]))


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("drafter.num_layers=5", "verifier that has 4"),
        ("drafter.num_layers=1", "at least 2"),
        ("drafter.layers=[0, 4]", "0..3"),
        ("drafter.layers=[0, 1, 2, 3, 4]", "0..3"),
    ],
)
def test_drafter_layers_the_verifier_lacks_are_refused(folder, override, named):
    text = refusal(folder, override)
    assert "drafter" in text and named in text


@pytest.mark.parametrize("kind", ["sliced", "pretrained"])
def test_a_head_of_more_ids_than_the_vocabulary_is_refused_with_both(folder, tmp_path, kind):
    drafter, most = "{kind: sliced, num_layers: 3, vocab_size: %d}", 260
    if kind == "pretrained":  # of fewer ids than the verifier: it cannot keep more than its own
        tiny_llama(vocab=250).config.save_pretrained(tmp_path)
        drafter, most = f"{{kind: pretrained, source: {tmp_path}, vocab_size: %d}}", 250
    overrides = ["base=null", f"drafter={drafter}"]
    text = refusal(folder, overrides[0], overrides[1] % (most + 1))
    assert f"drafter.vocab_size = {most + 1}" in text and f"vocabulary of {most} ids" in text
    shape = check(load_config(folder / "tiny.yaml", [overrides[0], overrides[1] % most]))[1]
    assert (shape.head_rows, shape.vocab) == (most, most)
    small = check(load_config(folder / "tiny.yaml", [overrides[0], overrides[1] % 100]))[1]
    assert small.head_rows == 100 and not small.tied


REFUSE = "drafter.beyond_positions=refuse"


def test_positions_past_the_drafters_are_refused_where_the_study_says_so(folder):
    text = refusal(folder, REFUSE)
    assert "grid.contexts = 128" in text and "128 positions" in text and "in_cache" in text and "extrapolate" in text
    check(load_config(folder / "tiny.yaml", [REFUSE, "grid.contexts=[64, 116]"]))


def test_what_is_chosen_from_all_keys_takes_absolute_positions(folder):
    both = ("grid.policy=[attention_mass, retrieval]", "grid.position_mode=[absolute, in_cache]")
    assert "exclude {policy: retrieval, position_mode: in_cache}" in refusal(folder, *both)
    check(load_config(folder / "tiny.yaml", [*both, "grid.exclude=[{policy: retrieval, position_mode: in_cache}]"]))


def test_in_cache_positions_stay_within_the_drafters_only_for_sparse_budgets(folder):
    in_cache = (REFUSE, "grid.position_mode=in_cache")
    assert "sparse budgets" in refusal(folder, *in_cache)
    check(
        load_config(folder / "tiny.yaml", [*in_cache, "grid.budgets=[32]", "grid.methods=[ar, sd_sparse, budgetdraft]"])
    )


def test_two_levels_keep_the_drafter_within_its_positions_and_the_librarys_loop_does_not(folder):
    check(load_config(folder / "tiny.yaml", [REFUSE, "grid.methods=[ar, triforce]"]))
    assert "128 positions" in refusal(folder, REFUSE, "grid.methods=[ar, triforce, hf_assisted]")


@pytest.mark.parametrize(("method", "workload"), [("hf_assisted", "sampled"), ("triforce", "replay")])
def test_a_method_without_a_workload_of_its_own_is_refused_by_name(folder, method, workload):
    methods = f"grid.methods=[ar, sd_full, {method}]"
    text = refusal(folder, methods, f"grid.workloads=[{workload}]")
    assert f"`{method}` is measured on greedy" in text and f"take {method} out of grid.methods" in text
    check(load_config(folder / "tiny.yaml", [methods, f"grid.workloads=[{workload}, greedy]"]))


@pytest.mark.parametrize("stage", ["base", "training"])
def test_training_past_the_drafters_positions_is_refused_where_the_study_says_so(folder, stage):
    text = refusal(folder, REFUSE, "grid.contexts=[64]", f"{stage}.prefix_lengths={{120: 1}}")
    assert text.startswith(f"{stage}: prefix + continuation = 136") and "128 positions" in text


def test_too_few_documents_say_how_many_there_are(folder):
    text = refusal(folder, "targets.forced=100")
    assert "targets.length = 160" in text and "100 documents" in text


def test_too_few_documents_for_generated_targets_are_refused(folder):
    assert "targets.prompt_tokens = 96: 100 documents" in refusal(folder, "targets.generated=100")


def test_too_few_documents_for_the_grid_are_refused(folder):
    assert "grid.contexts = 128: 50 documents" in refusal(folder, "grid.prompts=50")


REPLAY = ("grid.workloads=replay", "grid.contexts=[64]", "grid.replay_positions=5", "grid.replay_stride=10")


def test_a_replay_past_the_verifiers_positions_is_refused(folder):
    """Four strides of 10 and three drafts are 43 tokens after the context, of 512 positions."""
    check(load_config(folder / "tiny.yaml", [*REPLAY, "grid.contexts=[469]"]))
    text = refusal(folder, *REPLAY, "grid.contexts=[470]")
    assert "grid.contexts = 470: with the replay's tokens = 43" in text and "longest legal context is 469" in text


def test_documents_too_short_for_the_replay_are_refused(tmp_path, folder):
    corpus = write_corpus(tmp_path / "short", words=20)
    own = (f"grid.corpus.path={corpus}", *REPLAY)
    inputs(load_config(folder / "tiny.yaml", list(own)))
    text = refusal(folder, *own, "grid.replay_stride=30")
    assert text.startswith("grid.contexts and the replay after them = 187: 2 documents"), "64 + 4 * 30 + 3"


def test_a_replay_past_the_drafters_positions_is_refused_where_the_study_says_so(folder):
    """64 + 43 tokens fit into 128 positions, with strides of 20 they do not."""
    sparse = ("grid.methods=[ar, sd_sparse, budgetdraft]", "grid.budgets=[32]")
    check(load_config(folder / "tiny.yaml", [REFUSE, *REPLAY, *sparse]))
    assert "128 positions" in refusal(folder, REFUSE, *REPLAY, *sparse, "grid.replay_stride=20")
    in_cache = "grid.position_mode=[in_cache]"
    check(load_config(folder / "tiny.yaml", [REFUSE, *REPLAY, *sparse, "grid.replay_stride=20", in_cache]))
    both = "grid.position_mode=[in_cache, absolute]"
    assert "128 positions" in refusal(folder, REFUSE, *REPLAY, *sparse, "grid.replay_stride=20", both)


def test_each_corpus_of_the_grid_must_have_enough_documents_of_its_own(tmp_path, folder):
    few = write_corpus(tmp_path / "few", count=9, seed=1)
    own, other = (
        {"source": "folder", "path": str(p), "split": "test", "name": p.name} for p in (folder / "texts", few)
    )
    enough = inputs(load_config(folder / "tiny.yaml", [f"grid.corpus={[own]}"]))
    assert [len(documents) for documents in enough.corpora] == [len(enough.evaluation)]
    names = {name: (few / name).rename(few / f"few-{name}") for name in sorted(p.name for p in few.iterdir())}
    found = inputs(load_config(folder / "tiny.yaml", [f"grid.corpus={[own, other]}", "grid.prompts=1"]))
    assert len(found.corpora) == 2 and found.evaluation == [*found.corpora[0], *found.corpora[1]]
    assert {d.doc_id for d in found.corpora[1]} <= {path.name for path in names.values()}
    count = len(found.corpora[1]) + 1
    assert len(found.corpora[0]) >= count
    assert f"{count} documents" in refusal(folder, f"grid.corpus={[own, other]}", f"grid.prompts={count}")


def test_a_document_in_two_corpora_of_the_grid_is_refused(tmp_path, folder):
    copy = write_corpus(tmp_path / "copy")
    own, other = (
        {"source": "folder", "path": str(p), "split": "test", "name": p.name} for p in (folder / "texts", copy)
    )
    assert "in two of its corpora (such as text-" in refusal(folder, f"grid.corpus={[own, other]}")


def test_documents_too_short_for_the_context_are_refused(tmp_path, folder):
    corpus = write_corpus(tmp_path / "short", words=8)
    text = refusal(folder, f"grid.corpus.path={corpus}", "grid.corpus.source=folder")
    assert "grid.contexts = 128" in text and "at most 0 of" in text


def test_documents_shared_by_training_and_evaluation_are_refused(folder):
    text = refusal(folder, "grid.corpus.split=train")
    assert text.startswith("grid.corpus: ") and "training documents too" in text and "text-" in text


def test_a_training_text_under_another_name_in_the_grid_is_refused_with_both_names(tmp_path, folder):
    copies = tmp_path / "copies"
    copies.mkdir()
    for path in (folder / "texts").iterdir():
        (copies / f"copy of {path.name}").write_text(path.read_text() + "\n")
    text = refusal(folder, f"grid.corpus.path={copies}")
    assert text.startswith("grid.corpus: ") and "training documents too (such as text-" in text
    assert ".txt as copy of text-" in text and "remove the copies" in text


def test_texts_too_short_to_tell_apart_may_stand_in_both(tmp_path, folder):
    for seed, field in enumerate(("corpus", "grid.corpus")):
        corpus = write_corpus(tmp_path / field, seed=seed)
        for path in list(corpus.iterdir()):
            path.with_name(f"empty-{path.name}").write_text("# This directory is a Python package.\n")
    inputs(
        load_config(folder / "tiny.yaml", [f"{field}.path={tmp_path / field}" for field in ("corpus", "grid.corpus")])
    )


@pytest.mark.parametrize("name", ["nowhere", "texts"])
def test_folder_without_a_model_is_refused(folder, name):
    text = refusal(folder, f"verifier.source={folder / name}")
    assert "verifier.source" in text and str(folder / name) in text and "config.json" in text


def test_family_that_cannot_be_rolled_back_is_refused_by_name(folder, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mamba"}')
    text = refusal(folder, f"verifier.source={tmp_path}")
    assert "'mamba'" in text and "llama" in text


@pytest.mark.parametrize("field", ["corpus", "grid.corpus"])
def test_missing_corpus_names_its_field_and_path(folder, field):
    text = refusal(folder, f"{field}.path={folder / 'gone'}")
    assert text.startswith(f"{field}.path = {folder / 'gone'}")
