"""The embedded verifier: greedy speculative decoding is lossless for every method of the grid, on 50 real prompts."""

import copy
from itertools import combinations

import pytest
import torch

from bdcore.config import Config
from bdcore.decoding.decoder import decode, first_mismatch, prefill
from bdcore.documents import build_prompts, load_documents
from bdcore.evaluation.cell import Bench, measure_prompt
from bdcore.evaluation.grid import cells
from bdcore.kv.budget import Selection
from bdcore.models.drafter import Drafter, slice_verifier
from bdcore.models.heads import choose_layers, layer_scores
from bdcore.models.loading import eos_ids, load_model, load_tokenizer, materialise, quiet
from bdcore.models.shape import from_config, verifier_shape
from bdcore.models.stepper import CachePlan, Stepper
from bdcore.workspace import Workspace, default_root

PROMPTS, LENGTH, NEW_TOKENS = 50, 72, 8
BF16_PROMPTS, BF16_TOKENS = 8, 16


@pytest.fixture(scope="module")
def config() -> Config:
    return Config.model_validate(
        {
            "name": "real-pair",
            "verifier": {"source": "embedded"},
            "drafter": {"kind": "sliced", "beyond_positions": "extrapolate"},
            "grid": {
                "corpus": {"source": "stdlib", "split": "test"},
                "contexts": [LENGTH],
                "budgets": [32, "full"],
                "gammas": [4],
                "prompts": PROMPTS,
                "new_tokens": NEW_TOKENS,
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


@pytest.fixture(scope="module")
def tokenizer(source):
    return load_tokenizer(source)


@pytest.fixture(scope="module")
def prompts(config, tokenizer):
    documents = load_documents(config.grid.corpus[0])
    return build_prompts(documents, tokenizer, length=LENGTH, count=PROMPTS, seed=5).prompts


@pytest.fixture(scope="module")
def sliced(verifier, scores):
    with quiet():
        return slice_verifier(verifier, choose_layers(scores, 4), ids=None, rope_theta=None, max_positions=None)


def _two_of_four(i):
    return list(combinations(range(4), 2))[i % 6]


@pytest.fixture(scope="module")
def rows(config, verifier, tokenizer, prompts, sliced):
    """Sample rows: every prompt under `ar` and two of the four other cells in turn."""
    # The verifier as its own drafter accepts much, an untrained slice of it almost nothing: both paths are taken.
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
    alone, *others = cells(config.grid)
    assert len(others) == 4
    return [
        row
        for i, prompt in enumerate(prompts)
        for row in measure_prompt(bench, prompt, [alone, *(others[k] for k in _two_of_four(i))])[0]
    ]


@pytest.mark.slow
def test_greedy_output_equals_the_verifier_alone_on_real_prompts(rows):
    assert len({tuple(r["output_ids"]) for r in rows if r["method"] == "ar"}) > PROMPTS // 2, "not one text for all"
    assert len(rows) == 3 * PROMPTS
    assert [r["error"] for r in rows if r["status"] != "ok"] == []
    wrong = [(r["method"], r["budget"], r["doc_id"], r["first_mismatch"]) for r in rows if not r["exact_match"]]
    assert wrong == []
    full = [r for r in rows if r["method"] == "budgetdraft" and r["budget"] == -1]
    assert sum(r["accepted"] for r in full) == sum(r["drafted"] for r in full) > 0
    sparse = [r for r in rows if r["budget"] == 32]
    assert all(r["drafter_cached_peak"] <= 32 + r["gamma"] + 1 for r in sparse)
    assert 0 < sum(r["accepted"] for r in sparse) < sum(r["drafted"] for r in sparse)


@pytest.mark.slow
def test_without_one_chunk_the_best_token_is_mostly_that_of_the_whole_prompt(verifier, prompts, rows):
    """B10, second check: a cliff to near 0 would be a mask or position fault."""
    dense = [r["output_ids"][0] for r in rows if r["method"] == "ar"]
    plan = CachePlan(0, LENGTH - 8, Selection("attention_mass", chunk=8))
    best = []
    for prompt in prompts:
        stepper = Stepper(verifier, plan)
        best.append(int(stepper.prefill(prompt.ids)[0].argmax()))
        assert (stepper.logical, stepper.physical) == (LENGTH, LENGTH - 8)
    share = sum(a == b for a, b in zip(best, dense, strict=True)) / PROMPTS
    print(f"top-1 agreement without one chunk: {share:.2f}")
    assert share > 0.5


@pytest.mark.slow
def test_a_budget_of_256_takes_11_796_480_bytes_and_the_block_in_flight(verifier, tokenizer):
    """B20: 30 layers, 3 KV heads, 64 dimensions, keys and values in fp32; repeated heads would take three times it."""
    stepper = Stepper(verifier, CachePlan(0, 256, Selection("sink_recent"), block=5))
    ids = tokenizer("x = [1, 2, 3]\n" * 40)["input_ids"][:280]
    stepper.prefill(ids)
    assert (len(ids), stepper.physical) == (280, 256)
    views = [x for layer in stepper.cache.layers for x in layer.view()]
    assert {tuple(x.shape) for x in views} == {(1, 3, 256, 64)}
    assert sum(x.numel() * x.element_size() for x in views) == 11_796_480
    assert stepper.cache.bytes() == 11_796_480 // 256 * (256 + 5)
    assert from_config(verifier.config).kv_bytes(256, 4) == 11_796_480


@pytest.mark.slow
def test_in_bf16_every_first_mismatch_is_a_near_tie(source, sliced, prompts):
    """B08: one-token steps and blocks round differently; a gap of more than 2 bf16 steps would be a fault."""
    with quiet():
        verifier = load_model(source, dtype=torch.bfloat16, device="cpu")
    drafter = Drafter(copy.deepcopy(sliced.model).bfloat16(), None)
    plan = CachePlan(0, 32, Selection("attention_mass"), prefill_chunk=512, extrapolate=True)
    mismatches = []
    for prompt in prompts[:BF16_PROMPTS]:
        start = prefill(verifier, prompt.ids, new_tokens=BF16_TOKENS, gamma=4, chunk=512)
        run = {"new_tokens": BF16_TOKENS, "eos": frozenset()}
        alone = decode(start, None, **run)
        decoded = decode(start, drafter, plan, gamma=4, **run)
        assert decoded.tokens[0] == alone.tokens[0], "one prefill for every method"
        at = first_mismatch(decoded.tokens, alone.tokens)
        if at is not None:
            mismatches.append((prompt.doc_id, at, alone.gaps[at], alone.gap_steps[at]))
    print(f"bf16: {len(mismatches)} first mismatches in {BF16_PROMPTS} prompts of {BF16_TOKENS} tokens: {mismatches}")
    assert [m for m in mismatches if m[3] > 2] == []
