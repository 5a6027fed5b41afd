"""Replay along a document against plain forwards without any cache, and what is shared, bounded and isolated in it."""

import copy
from functools import cache

import pytest
import torch

from bdcore.config import Config, GridConfig
from bdcore.decoding.decoder import decode, prefill
from bdcore.decoding.sequence import Row, look
from bdcore.documents import Document, Prompt
from bdcore.evaluation.cell import cell_plan
from bdcore.evaluation.drafts import ModelDrafts
from bdcore.evaluation.grid import cells
from bdcore.evaluation.places import Evidence, token_class
from bdcore.evaluation.replay import all_positions, positions_of, replay
from bdcore.evaluation.rows import Bench
from bdcore.evaluation.texts import documents_of, prompts_of
from bdcore.evaluation.truth import Truth
from bdcore.kv.budget import FULL, STORES_ALL
from bdcore.models.drafter import Drafter
from bdcore.schema import ROUNDS, SAMPLES, to_table
from tests.conftest import noisy_copy, tiny_llama
from tests.tiny import byte_tokenizer
from tests.unit.test_cell import Broken

GAMMAS = [1, 2, 4]
POLICIES = ["attention_mass", "last_key", "sink_recent", "random"]


class Numbers:
    """Decodes an id as its number, odd ones after a space."""

    def decode(self, ids):
        return "".join((" " if i % 2 else "") + str(i) for i in ids)


def config(**changes):
    grid = {
        "contexts": [40, 64], "budgets": [32, "full"], "gammas": GAMMAS, "prompts": 1, "workloads": "replay",
        "replay_positions": 4, "replay_stride": 3, **changes,
    }  # fmt: skip
    return Config(grid=GridConfig(**grid))


@cache
def calm_verifier():
    """Its tokens hang less on the whole context than those of the plain tiny Llama: near copies often agree."""
    model = tiny_llama()
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= 0.1
    return model


@cache
def near(scale=0.01):
    return Drafter(noisy_copy(calm_verifier(), scale), None)


def bench(base=None, trained=None, verifier=None, **changes):
    return Bench(
        run_key="run",
        config=config(**changes),
        verifier=verifier or calm_verifier(),
        tokenizer=Numbers(),
        drafters={"base": base or near(), "trained": trained or near(0.02)},
        drafter_keys={"base": "key-b", "trained": "key-t"},
        eos=frozenset(),
        device="cpu",
        dtype="float32",
    )


def document(length, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return Prompt("doc", "stdlib", 0, torch.randint(3, 128, (length,), generator=generator).tolist(), truncated=True)


def replayed(ready, text=None, **kwargs):
    grid = ready.config.grid
    every = [cell for cell in cells(grid) if cell.workload == "replay"]
    rows, _ = replay(ready, text or document(grid.longest), every, **kwargs)
    assert [row["cell_key"] for row in rows] == [cell.key for cell in every]
    assert to_table(rows, SAMPLES).num_rows == len(every)
    return rows


@cache
def _eager(model):
    plain = copy.deepcopy(model)
    plain.set_attn_implementation("eager")
    return plain


@torch.no_grad()
def says(model, ids):
    """The greedy token after `ids`, by the library's own attention in one forward without a cache."""
    return int(_eager(model)(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax())


def accepted_by_hand(drafter, verifier, ids, gamma):
    drafts = []
    for _ in range(gamma):
        drafts.append(says(drafter, [*ids, *drafts]))
    accepted = 0
    while accepted < gamma and drafts[accepted] == says(verifier, [*ids, *drafts[:accepted]]):
        accepted += 1
    return accepted


def counts(row):
    names = ("rounds", "drafted", "accepted", "drafted_at", "accepted_at", "far_rounds", "far_accepted")
    return {name: row[name] for name in names}


def key(row):
    return row["method"], row["context"], row["budget"], row["policy"], row["position_mode"], row["gamma"]


# --- against plain forwards


@pytest.mark.parametrize("contexts", [[40, 64], [40, 44]])  # apart; and ranges of positions that overlap
def test_a_full_cache_accepts_what_plain_forwards_accept(contexts):
    ready = bench(contexts=contexts)
    text = document(ready.config.grid.longest)
    rows = [row for row in replayed(ready, text) if row["method"] == "sd_full"]
    assert len(rows) == len(contexts) * len(GAMMAS)
    for row in rows:
        positions = [row["context"] + 3 * i for i in range(4)]
        each = [
            accepted_by_hand(near().model, calm_verifier(), text.ids[:position], row["gamma"]) for position in positions
        ]
        assert (row["rounds"], row["drafted"], row["accepted"]) == (4, 4 * row["gamma"], sum(each))
        assert row["accepted_at"] == [sum(n > i for n in each) for i in range(row["gamma"])]
        assert row["drafted_at"] == [4] * row["gamma"]
    assert 0 < sum(row["accepted"] for row in rows) < sum(row["drafted"] for row in rows)


@pytest.mark.parametrize(
    ("policy", "mode"),
    [(p, m) for p in POLICIES for m in ("absolute", "in_cache")] + [(p, "absolute") for p in sorted(STORES_ALL)],
)
def test_a_sparse_cache_drafts_at_a_first_position_what_it_drafts_in_decoding(policy, mode, monkeypatch):
    """Along the verifier's own text the first round of decoding starts from the same tokens."""
    drafted, verdict = [], Row.verdict
    monkeypatch.setattr(Row, "verdict", lambda row, logits: (drafted.append(row.draft), verdict(row, logits))[1])
    prompt = document(89, seed=5).ids
    start = prefill(calm_verifier(), prompt, new_tokens=12, gamma=4, chunk=512)
    ready = bench(policy=policy, position_mode=mode)
    plan = cell_plan(ready.config, next(c for c in cells(ready.config.grid) if c.method == "sd_sparse"))
    own = decode(start, near(), plan, gamma=4, new_tokens=12, eos=frozenset()).tokens
    assert plan.budget == 32 and len(drafted[1]) == 4  # the first verdict is on the prompt alone
    drafts = ModelDrafts(near(), plan, [*prompt, *own], 4, look(start.stepper))
    assert drafts.at(90, choice=drafted[1][0]) == (drafted[1], 4)
    assert drafts.stepper.logical == 90 and all(layer.read.physical <= 32 for layer in drafts.stepper.cache.layers)


@pytest.mark.parametrize("policy", [*POLICIES, "oracle", *sorted(STORES_ALL)])
def test_a_sparse_cache_goes_on_along_the_document_whatever_was_drafted(policy):
    """Drafts leave nothing behind: after long chains the drafts are those after chains that stopped at once."""
    ids, found = document(120).ids, []
    for gamma in (1, 4):
        truth = Truth(calm_verifier(), ids, [60, 61, 69, 100], gamma=4, chunk=512, observe=8)
        ready = bench(policy=policy)
        plan = cell_plan(ready.config, next(c for c in cells(ready.config.grid) if c.method == "sd_sparse"))
        drafts, firsts = ModelDrafts(near(), plan, ids, gamma, truth.oracle), []
        for position in truth.positions:
            truth.read(position)
            tokens, _ = drafts.at(position, choice=AnyToken())
            assert len(tokens) == gamma
            firsts.append(tokens[0])
        found.append(firsts)
    assert found[0] == found[1]


class AnyToken(int):
    """Equal to every token."""

    def __eq__(self, other):
        return True

    def __hash__(self):
        return 0


def test_far_dependent_positions_are_those_that_plain_forwards_of_the_window_tell():
    window, changes = 24, {"contexts": [20, 64], "replay_positions": 8, "replay_stride": 2, "prefill_chunk": 72}
    ready = bench(
        far_window=window, verifier=tiny_llama(), base=Drafter(noisy_copy(tiny_llama(), 0.005), None), **changes
    )
    text = document(ready.config.grid.longest)
    rows = [row for row in replayed(ready, text) if row["method"] == "sd_full"]
    for row in rows:
        positions = [row["context"] + 2 * i for i in range(8)]
        far = [
            p > window and says(ready.verifier, text.ids[:p]) != says(ready.verifier, text.ids[p - window : p])
            for p in positions
        ]
        hits = [accepted_by_hand(ready.drafters["base"].model, ready.verifier, text.ids[:p], 1) for p in positions]
        assert (row["far_window"], row["far_rounds"]) == (window, sum(far))
        assert row["far_accepted"] == sum(f * h for f, h in zip(far, hits, strict=True))
    assert any(row["far_accepted"] > 0 for row in rows)
    assert {row["far_rounds"] < 8 for row in rows if row["context"] == 20} == {True}, "none before the window is full"


def test_a_position_is_far_dependent_from_one_token_past_the_window_on():
    model, window = tiny_llama(), 24
    texts = [document(window + 1, seed).ids for seed in range(20)]
    hangs = [says(model, ids) != says(model, ids[1:]) for ids in texts]
    assert 0 < sum(hangs) < 20
    for ids, far in zip(texts, hangs, strict=True):
        truth = Truth(model, ids, [window, window + 1], gamma=1, chunk=512, far_window=window)
        truth.read(window)
        assert not truth.far
        truth.read(window + 1)
        assert truth.far == far


def test_without_a_far_window_its_columns_are_null():
    assert {(r["far_window"], r["far_rounds"], r["far_accepted"]) for r in replayed(bench())} == {(None, None, None)}


# --- what the counts must obey


def test_a_shorter_draft_length_accepts_what_the_longer_ones_first_drafts_do():
    rows = {key(row): row for row in replayed(bench(methods=["ar", "ngram", "sd_full", "sd_sparse", "budgetdraft"]))}
    longest = [k for k in rows if k[-1] == 4]
    assert len(longest) == 2 * (1 + 1 + 1 + 2)
    for k in longest:
        for gamma in (1, 2):
            short = rows[(*k[:-1], gamma)]
            assert short["accepted_at"] == rows[k]["accepted_at"][:gamma]
            assert short["accepted"] == sum(short["accepted_at"]) and short["drafted"] == sum(short["drafted_at"])
    alone = {key(row): row for row in replayed(bench(gammas=[2]))}
    assert all(counts(alone[k]) == counts(rows[k]) for k in alone), "the same counts without the longer lengths"


def test_a_twin_with_a_full_cache_is_always_right():
    rows = replayed(bench(trained=Drafter(copy.deepcopy(calm_verifier()), None), far_window=24))
    full = [row for row in rows if row["method"] == "budgetdraft" and row["budget"] == FULL]
    assert len(full) == 6
    for row in full:
        assert row["accepted"] == row["drafted"] == 4 * row["gamma"]
        assert row["far_accepted"] == row["far_rounds"]


def test_lookup_drafts_from_the_document_so_far():
    """A document of period 5 whose greedy continuation it is not: proposals are the period, judged by the verifier."""
    ready = bench(methods=["ar", "ngram"], contexts=[41], replay_positions=2)
    ids = (document(5).ids * 20)[: ready.config.grid.longest]
    rows = replayed(ready, Prompt("doc", "stdlib", 0, ids, truncated=True))
    assert {(r["method"], r["budget"], r["policy"], r["drafter_key"], r["drafter_cached_peak"]) for r in rows} == {
        ("ngram", FULL, "full", None, 0)
    }
    for row in rows:
        each = []
        for p in (41, 44):
            proposed, right = ids[p : p + row["gamma"]], 0
            while right < row["gamma"] and says(ready.verifier, [*ids[:p], *proposed[:right]]) == proposed[right]:
                right += 1
            each.append(right)
        assert (row["drafted"], row["accepted"]) == (2 * row["gamma"], sum(each))


def test_a_lookup_that_finds_nothing_drafts_nothing():
    ready = bench(methods=["ar", "ngram"], contexts=[41])
    rows = replayed(ready, Prompt("doc", "stdlib", 0, list(range(3, 3 + ready.config.grid.longest)), truncated=True))
    assert {(row["rounds"], row["drafted"], row["accepted"]) for row in rows} == {(4, 0, 0)}


@pytest.mark.parametrize("budget", [32, 48])
def test_keys_never_exceed_the_budget_and_the_block(budget):
    ready = bench(budgets=[budget, "full"], policy=[*POLICIES, "oracle"], position_mode=["absolute", "in_cache"])
    rows = replayed(ready)
    sparse = [row for row in rows if row["budget"] == budget]
    assert len(sparse) == 2 * 2 * 5 * 2 * 3
    key_bytes = 2 * 2 * 2 * 16 * 4  # keys and values, layers, heads, head dim, fp32
    for row in sparse:
        assert budget - 8 <= row["drafter_cached_peak"] <= budget + 5
        assert row["drafter_kv_bytes_peak"] == (budget + 5) * key_bytes
    for row in rows:
        if row["budget"] == FULL:  # at the last position all tokens and the block of the longest draft
            last = row["context"] + 3 * 3
            assert last <= row["drafter_cached_peak"] <= last + 3
            assert row["drafter_kv_bytes_peak"] == row["drafter_cached_peak"] * key_bytes


# --- lockstep


@pytest.mark.parametrize("policy", ["attention_mass", "oracle"])
def test_in_lockstep_a_configuration_counts_what_it_counts_alone(policy):
    settings = {"policy": [policy, "sink_recent"], "budgets": [32, 48, "full"], "far_window": 24}
    together = {key(row): counts(row) for row in replayed(bench(**settings))}
    alone = bench(**{**settings, "policy": [policy], "budgets": [32]}, methods=["ar", "sd_sparse"])
    rows = replayed(alone)
    assert len(rows) == 6
    assert all(counts(row) == together[key(row)] for row in rows)


def test_the_verifier_reads_each_token_once_and_checks_equal_drafts_once(monkeypatch):
    reads, checks = [], []
    real_read, real_check = Truth.read, Truth._verify
    monkeypatch.setattr(Truth, "read", lambda self, p: (reads.append(p), real_read(self, p))[1])
    monkeypatch.setattr(
        Truth, "_verify", lambda self, drafts: (checks.append((reads[-1], drafts)), real_check(self, drafts))[1]
    )
    ready = bench(trained=near(), budgets=[32, "full"])  # both roles draft the same
    replayed(ready)
    assert reads == all_positions(ready.config.grid) == [40, 43, 46, 49, 64, 67, 70, 73]
    assert len(checks) == len(set(checks))


def test_the_verifier_is_at_the_document_again_after_checking():
    ids = document(60).ids
    truth = Truth(calm_verifier(), ids, [40, 50], gamma=4, chunk=16)
    right: list[int] = []
    for position in (40, 50):
        truth.read(position)
        assert truth.choice == says(calm_verifier(), ids[:position])
        if right:
            assert right[0] != truth.choice and truth.accepted(right) == 0, "what was right before is not now"
        right = [truth.choice]
        while len(right) < 4:
            right.append(says(calm_verifier(), [*ids[:position], *right]))
        wrong = [*right[:2], (right[2] + 1) % 128, right[3]]
        assert [truth.accepted(d) for d in (right, wrong, right[:1], [right[0] + 1], [])] == [4, 2, 1, 0, 0]
        assert truth.stepper.logical == position


def test_progress_is_told_at_every_position():
    told = []
    ready = bench()
    replayed(ready, on_position=lambda: told.append(1))
    assert len(told) == len(all_positions(ready.config.grid))


# --- failures


@pytest.mark.parametrize("after", [0, 9])  # before its first context is done, in either case
def test_a_drafter_that_raises_fails_alone(after):
    good = {key(row): row for row in replayed(bench())}
    rows = replayed(bench(base=Drafter(Broken(near().model, after), None)))
    failed = [row for row in rows if row["status"] == "failed"]
    assert {row["method"] for row in failed} >= {"sd_sparse", "sd_full"}
    for row in rows:
        if row["method"] == "budgetdraft":
            assert row == good[key(row)]
    for row in failed:
        assert row["method"] != "budgetdraft" and row["accepted"] is row["rounds"] is None
        assert row["error"].startswith("RuntimeError: out of memory: tried to allocate 3 GiB (")


def test_contexts_finished_before_a_failure_stay_measured():
    short = Drafter(noisy_copy(tiny_llama(max_positions=60), 0.01), None)
    ready = bench(base=short)
    drafter = ready.config.drafter.model_copy(update={"beyond_positions": "refuse"})
    ready = Bench(**{**vars(ready), "config": ready.config.model_copy(update={"drafter": drafter})})
    rows = [row for row in replayed(ready) if row["drafter_name"] == "base"]
    assert {(row["context"], row["status"]) for row in rows} == {(40, "ok"), (64, "failed")}
    assert all("beyond the model's 60" in row["error"] for row in rows if row["context"] == 64)


def test_a_verifier_that_raises_fails_everything_that_was_not_done():
    rows = replayed(bench(verifier=tiny_llama(max_positions=56)))
    assert {(row["context"], row["status"]) for row in rows} == {(40, "ok"), (64, "failed")}
    assert all("beyond the model's 56" in row["error"] for row in rows if row["context"] == 64)


# --- texts


def test_every_context_takes_documents_of_each_corpus_that_are_long_enough_for_the_replay():
    grid = config(contexts=[40, 64], prompts=2).grid
    assert grid.longest == 64 + 3 * 3 + 4
    words = ["a" * n for n in (grid.longest - 1, grid.longest, 200, 300)]  # a byte is a token
    corpora = [[Document(f"{c}{i}", c, text, "why?") for i, text in enumerate(words)] for c in ("pg19", "file")]
    long = documents_of(grid, corpora, byte_tokenizer(), 1)
    assert [(d.source, len(d.ids)) for d in long] == [("pg19", 77)] * 2 + [("file", 77)] * 2
    assert not {"pg190", "file0"} & {d.doc_id for d in long}
    with pytest.raises(ValueError, match="instruction and question"):  # a greedy prompt asks its question
        prompts_of(grid, corpora, byte_tokenizer(), 1, 64)
    plain = [[Document(d.doc_id, d.source, d.text) for d in documents] for documents in corpora]
    short = prompts_of(grid, plain, byte_tokenizer(), 1, 40)
    assert {d.doc_id for d in short} == {d.doc_id for d in long} and {len(d.ids) for d in short} == {40}


def test_what_another_study_found_of_a_document_is_not_read_again(monkeypatch):
    """One-token drafts then need no verifier at all; longer ones read up to where they are checked. Rows stay equal."""
    known, reads = {}, []
    one = bench(far_window=16, gammas=[1])
    first = replayed(one, known=known)
    assert sorted(known) == all_positions(one.config.grid) and any(far for _, far in known.values())
    fed = Truth._catch_up
    monkeypatch.setattr(Truth, "_catch_up", lambda self: reads.append(self.position) or fed(self))
    assert replayed(one, known=dict(known)) == first and not reads
    several = bench(far_window=16)
    again = replayed(several, known=dict(known))
    assert reads and again == replayed(several)


# --- rounds: where in a text drafts die


def test_a_round_row_per_position_adds_up_to_the_sample_row():
    ready = bench()
    grid = ready.config.grid
    every = [cell for cell in cells(grid) if cell.workload == "replay"]
    samples, rounds = replay(ready, document(grid.longest), every)
    to_table(rounds, ROUNDS)
    assert len(rounds) == len(every) * grid.replay_positions
    for sample, cell in zip(samples, every, strict=True):
        mine = [r for r in rounds if r["cell_key"] == sample["cell_key"]]
        assert [r["position"] for r in mine] == list(positions_of(grid, cell.context))
        assert sum(r["drafted"] for r in mine) == sample["drafted"]
        assert sum(r["accepted"] for r in mine) == sample["accepted"]
        assert all(r["token_class"] == "number" and r["workload"] == "replay" for r in mine)


def test_evidence_is_where_the_token_last_followed_the_same_two():
    ids = [1, 2, 3, 9, 1, 2, 4, 1, 2, 3, 1, 2]
    found = Evidence(ids)
    assert found.distance(6, 3) == 4  # 1 2 -> 3 stood at 2
    assert found.distance(6, 4) is None  # stands there itself, so not before
    assert found.distance(9, 4) == 3
    assert found.distance(9, 3) == 7
    assert found.distance(12, 3) == 3
    assert found.distance(12, 7) is None
    assert Evidence(ids).distance(1, 2) is None


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("\n   ", "newline"), ("  ", "space"), (" 42", "number"), (" the", "word"), ("The", "word"), ("ing", "part"),
        ("_name", "part"), (" ==", "punctuation"), ("):\n", "punctuation"), (" x=1", "other"),
    ],
)  # fmt: skip
def test_token_classes(text, kind):
    assert token_class(text) == kind
