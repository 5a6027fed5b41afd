"""The embedded verifier: greedy speculative decoding is lossless for every method of the grid, on 20 real prompts."""

import pytest
import torch

from bdcore.config import Config
from bdcore.documents import build_prompts, load_documents
from bdcore.evaluation.cell import Bench, measure_prompt
from bdcore.evaluation.grid import cells
from bdcore.models.drafter import Drafter, slice_verifier
from bdcore.models.heads import choose_layers, layer_scores
from bdcore.models.loading import eos_ids, load_model, load_tokenizer, materialise, quiet
from bdcore.models.shape import from_config, verifier_shape
from bdcore.workspace import Workspace, default_root

PROMPTS = 20


@pytest.fixture(scope="module")
def config() -> Config:
    return Config.model_validate(
        {
            "name": "real-pair",
            "verifier": {"source": "embedded"},
            "drafter": {"kind": "sliced", "beyond_positions": "extrapolate"},
            "grid": {
                "corpus": {"source": "stdlib", "split": "test"},
                "contexts": [72],
                "budgets": [32, "full"],
                "gammas": [4],
                "prompts": PROMPTS,
                "new_tokens": 10,
            },
        }
    )


@pytest.fixture(scope="module")
def source(config) -> str:
    # The default workspace, where the set-up has already converted the model.
    with quiet():
        return materialise(config.verifier, Workspace(default_root()).models)


@pytest.fixture(scope="module")
def verifier(source):
    with quiet():
        return load_model(source, dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def scores(verifier):
    return layer_scores(verifier, seed=0)


@pytest.mark.slow
def test_the_shape_known_beforehand_is_that_of_the_model(config, verifier):
    assert verifier_shape(config.verifier) == from_config(verifier.config)


@pytest.mark.slow
def test_the_layers_that_copy_are_found_by_their_scores(scores):
    # Known of this model: induction heads in layers 17, 18, 20, 23, previous-token heads in 1, 2, 11, 16.
    best = sorted(scores, key=lambda s: -s.induction)[:4]
    assert {s.layer for s in best} == {17, 18, 20, 23}
    assert all(scores[layer].previous_token > 0.5 for layer in (1, 2, 11, 16))
    chosen = choose_layers(scores, 6)
    assert chosen[0] == 0 and chosen[-1] == 29
    assert {17, 18} <= set(chosen) and set(chosen) & {1, 2, 11, 16}


@pytest.mark.slow
def test_greedy_output_equals_the_verifier_alone_on_real_prompts(config, source, verifier, scores):
    tokenizer = load_tokenizer(source)
    # The verifier as its own drafter accepts much, an untrained slice of it almost nothing: both paths are taken.
    with quiet():
        sliced = slice_verifier(verifier, choose_layers(scores, 4), ids=None, rope_theta=None, max_positions=None)
    bench = Bench(
        run_key="real",
        config=config,
        verifier=verifier,
        tokenizer=tokenizer,
        drafters={"base": sliced, "trained": Drafter(verifier, None)},
        drafter_keys={"base": "sliced", "trained": "self"},
        eos=eos_ids(verifier, tokenizer),
        device="cpu",
        dtype="float32",
    )
    documents = load_documents(config.grid.corpus)
    prompts = build_prompts(documents, tokenizer, length=72, count=PROMPTS, seed=5).prompts
    rows = [row for prompt in prompts for row in measure_prompt(bench, prompt, cells(config.grid))[0]]
    assert len(rows) == 5 * PROMPTS
    assert [r["error"] for r in rows if r["status"] != "ok"] == []
    wrong = [(r["method"], r["budget"], r["doc_id"], r["first_mismatch"]) for r in rows if not r["exact_match"]]
    assert wrong == []
    full = [r for r in rows if r["method"] == "budgetdraft" and r["budget"] == -1]
    assert sum(r["accepted"] for r in full) == sum(r["drafted"] for r in full) > 0
    sparse = [r for r in rows if r["budget"] == 32]
    assert all(r["drafter_cached_peak"] <= 32 + r["gamma"] + 1 for r in sparse)
    assert 0 < sum(r["accepted"] for r in sparse) < sum(r["drafted"] for r in sparse)
