"""Greedy speculative decoding is the verifier alone: 200 prompts x policies x budgets x gammas x position modes.

The reference is the library's own eager attention without a cache; it shares nothing with the code under test.
"""

import copy
import random
from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch

from bdcore.decoding.decoder import decode, decode_batch, prefill
from bdcore.kv.budget import FULL, FULL_POLICY, STORES_ALL, Selection
from bdcore.kv.selection import POLICIES
from bdcore.models.drafter import Drafter
from bdcore.models.stepper import CachePlan
from tests.conftest import noisy_copy, tiny_llama
from tests.unit.test_decoder import keep_ledger

PROMPTS, NEW_TOKENS, MOST = 200, 16, 8
LENGTHS = (1, 6, 31, 32, 33, 64, 97, 130)
# Without the controls `no_sinks` and `no_recent`, which differ in the choice of chunks alone.
EVERY_POLICY = (*sorted(p for p in POLICIES if not p.startswith("no_")), FULL_POLICY)
BUDGETS, GAMMAS, MODES = (32, 48, 96, FULL), (1, 2, 4, MOST), ("absolute", "in_cache")
SETTINGS = [(p, m) for p in EVERY_POLICY for m in MODES if p not in STORES_ALL or m == "absolute"]
# Noise on a drafter's weights: it accepts much, some, little.
NOISES = {"strong": (0.0, 0.005, 0.02), "calm": (0.0, 0.003, 0.01)}
NEVER = frozenset()


@cache
def verifier(kind):
    """`strong`: the whole context decides about every token. `calm`: less so, and a sparse drafter is often right."""
    model = tiny_llama()
    if kind == "calm":
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.o_proj.weight *= 0.03
    return model


@cache
def drafter(kind, noise):
    return Drafter(noisy_copy(verifier(kind), noise, seed=2), None)


@cache
def prompts():
    """All distinct, those of one token too."""
    generator = torch.Generator().manual_seed(11)
    rest = [torch.randint(3, 128, (LENGTHS[i % 8] - 1,), generator=generator).tolist() for i in range(PROMPTS)]
    return [[3 + i // 8, *ids] for i, ids in enumerate(rest)]


@cache
def texts(kind):
    """Each prompt's greedy text, prompts of one length at a time."""
    model = copy.deepcopy(verifier(kind))
    model.set_attn_implementation("eager")
    out = {}
    for first in range(len(LENGTHS)):
        rows = range(first, PROMPTS, len(LENGTHS))
        ids_BT = torch.tensor([prompts()[i] for i in rows])
        for _ in range(NEW_TOKENS):
            with torch.inference_mode():
                logits_BV = model(ids_BT, use_cache=False, logits_to_keep=1).logits[:, -1]
            ids_BT = torch.cat([ids_BT, logits_BV.argmax(-1, keepdim=True)], 1)
        out |= {i: ids_BT[row, LENGTHS[first] :].tolist() for row, i in enumerate(rows)}
    return out


@cache
def started(kind, index):
    """The prompt, read once for all its cells."""
    return prefill(verifier(kind), prompts()[index], new_tokens=NEW_TOKENS, gamma=MOST, chunk=64, observe=8)


def cut(text, eos):
    """The text up to its first EOS, and why it ends."""
    ends = [i for i, token in enumerate(text) if token in eos]
    return (text[: ends[0] + 1], "eos") if ends else (text, "length")


def plan_of_the_study():
    """(policy, budget, gamma, mode, prompts of a batch, prompt alone, kind of the batch): every cell, all prompts."""
    rng = random.Random(5)
    cells = [(p, budget, gamma, m) for (p, m), budget, gamma in product(SETTINGS, BUDGETS, GAMMAS)]
    rng.shuffle(cells)
    supply = [i for _ in range(4) for i in rng.sample(range(PROMPTS), PROMPTS)]
    return [
        (*cell, (supply[3 * n], supply[3 * n + 1]), supply[3 * n + 2], rng.choice(("strong", "calm")))
        for n, cell in enumerate(cells)
    ]


STUDY = plan_of_the_study()


def test_the_study_takes_every_prompt_and_the_whole_product():
    assert len({tuple(p) for p in prompts()}) == PROMPTS
    assert {i for cell in STUDY for i in (*cell[4], cell[5])} == set(range(PROMPTS))
    assert {cell[:4] for cell in STUDY} == {(p, b, g, m) for (p, m), b, g in product(SETTINGS, BUDGETS, GAMMAS)}
    assert all(len({*cell[4], cell[5]}) == 3 for cell in STUDY)


@pytest.mark.parametrize(("policy", "mode"), SETTINGS)
def test_greedy_text_is_the_verifiers_own_for_every_prompt_budget_and_gamma(policy, mode, monkeypatch):
    steps = keep_ledger(monkeypatch)
    rng, wrong, counts = random.Random(f"{policy} {mode}"), [], Counter()
    for cell_policy, budget, gamma, cell_mode, batch, single, kind in STUDY:
        if (cell_policy, cell_mode) != (policy, mode):
            continue
        plan = CachePlan(0, budget, Selection(policy), mode, prefill_chunk=64, refresh=rng.choice((0, 0, 2)))
        other = "calm" if kind == "strong" else "strong"
        for name, indices in ((kind, batch), (other, (single,))):
            # A third of the runs ends early, at a token of the first text.
            eos = {rng.choice(texts(name)[indices[0]])} if rng.random() < 0.34 else NEVER
            starts, model = [started(name, i) for i in indices], drafter(name, rng.choice(NOISES[name]))
            run = {"gamma": gamma, "new_tokens": NEW_TOKENS, "eos": eos}
            results = (
                decode_batch(starts, model, plan, **run) if len(starts) > 1 else [decode(starts[0], model, plan, **run)]
            )
            for i, decoded in zip(indices, results, strict=True):
                if (decoded.tokens, decoded.finish_reason) != cut(texts(name)[i], eos):
                    wrong.append((name, i, budget, gamma, sorted(eos)))
                counts["runs"] += 1
                counts["accepted"] += sum(r.accepted for r in decoded.rounds)
                counts["drafted"] += sum(r.drafted for r in decoded.rounds)
                if plan.drops:
                    assert decoded.drafter_cached_peak <= budget + gamma + 1
    assert wrong == []
    assert counts["runs"] == 48
    assert 0.1 < counts["accepted"] / counts["drafted"] < 0.9, "right and wrong drafts, or the test shows little"
    assert min(steps) > 100
