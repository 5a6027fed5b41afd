"""The verifier's greedy tokens: the same for every chunk size and batch; and the task that makes a set of them."""

import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pyarrow.parquet as pq
import pytest
import torch
from prefect.logging import disable_run_logger

from bdcore.config import ConfigError
from bdcore.documents import Prompt
from bdcore.identity import read_manifest
from bdcore.models.stepper import feed_together
from bdcore.study import open_study
from bdcore.targets.generate import Greedy, forced, generated, top_logprobs
from bdcore.targets.rows import row
from tasks import targets as module
from tasks.targets import generate_targets, prepare_verifier
from tests.tiny import write_study
from tests.unit.reference import causal, masked_logits

NEVER = frozenset()


def close(mine, theirs):
    torch.testing.assert_close(torch.tensor(mine), torch.tensor(theirs), atol=1e-4, rtol=0)


@pytest.mark.parametrize("chunk", [1, 7, 32, 100])
def test_forced_targets_are_the_greedy_choices_whatever_the_chunk(verifier, prompt, chunk):
    ids = prompt(100)
    logits = masked_logits(verifier, ids, causal(verifier, 100))
    greedy = forced(verifier, ids, top_k=3, chunk=chunk)
    assert greedy.ids == logits.argmax(-1).tolist()
    assert greedy.finish_reason == "length"
    best = logits.log_softmax(-1).topk(3)
    assert greedy.topk_ids == best.indices.tolist()
    close(greedy.topk_logprobs, best.values.tolist())


def test_a_forced_target_depends_on_what_stands_before_it_only(verifier, prompt):
    ids = prompt(60)
    assert forced(verifier, ids[:40], top_k=1).ids == forced(verifier, ids, top_k=1).ids[:40]


def continuations(verifier, prompts, *, eos=NEVER, batch_size=2, new_tokens=24, top_k=3, **told):
    found = generated(verifier, prompts, new_tokens=new_tokens, top_k=top_k, eos=eos, batch_size=batch_size, **told)
    return list(found)


def plain_greedy(verifier, ids, new_tokens=24):
    """The continuation by whole forwards in plain PyTorch, without any cache."""
    text = list(ids)
    for _ in range(new_tokens):
        text.append(masked_logits(verifier, text, causal(verifier, len(text)))[-1].argmax().item())
    return text[len(ids) :]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_rows_generated_together_equal_rows_generated_one_by_one(verifier, prompt, batch_size):
    prompts = [prompt(n) for n in (5, 9, 20, 9, 2)]
    together = continuations(verifier, prompts, batch_size=batch_size)
    for ids, row_of_batch in zip(prompts, together, strict=True):
        (single,) = continuations(verifier, [ids], batch_size=1)
        assert row_of_batch.ids == single.ids == plain_greedy(verifier, ids)
        assert row_of_batch.topk_ids == single.topk_ids
        close(row_of_batch.topk_logprobs, single.topk_logprobs)


def test_generated_targets_are_the_forced_targets_of_their_own_text(verifier, prompt):
    ids = prompt(20)
    (text,) = continuations(verifier, [ids])
    again = forced(verifier, [*ids, *text.ids[:-1]], top_k=3)
    assert again.ids[19:] == text.ids
    assert again.topk_ids[19:] == text.topk_ids
    close(again.topk_logprobs[19:], text.topk_logprobs)


def first_only(rows, least=3, most=10):
    """A token that the first of these continuations has at a place in between, first there, and the others never."""
    return next(
        (i, t)
        for i, t in enumerate(rows[0])
        if least <= i <= most and rows[0].index(t) == i and not any(t in row for row in rows[1:])
    )


@pytest.mark.parametrize("batch_size", [1, 2, 5])
def test_eos_is_kept_ends_its_row_alone_and_none_is_invented(verifier, prompt, batch_size):
    prompts = [prompt(n) for n in (5, 9, 20, 7)]
    free = [plain_greedy(verifier, ids, 16) for ids in prompts]
    at, eos = first_only(free)
    rows = continuations(verifier, prompts, new_tokens=16, eos={eos}, batch_size=batch_size)
    assert [r.ids for r in rows] == [free[0][: at + 1], *free[1:]]
    assert [r.finish_reason for r in rows] == ["eos", "length", "length", "length"]
    assert [(len(r.topk_ids), len(r.topk_logprobs)) for r in rows] == [(at + 1, at + 1), *[(16, 16)] * 3]


def test_the_place_of_a_row_that_ended_goes_to_the_next_prompt(verifier, prompt):
    prompts = [prompt(n) for n in (5, 9, 20)]
    at, eos = first_only([plain_greedy(verifier, ids, 16) for ids in prompts])
    told = []
    continuations(verifier, prompts, new_tokens=16, eos={eos}, batch_size=2, on_tokens=told.append)
    # Two rows at a time until the second ends after 16 steps; the third began when the first ended, after at + 1.
    assert told == [2 * i for i in range(1, 17)] + [32 + i for i in range(1, at + 2)]
    assert told[-1] == 16 + 16 + at + 1


def test_no_more_rows_than_the_batch_run_at_once(verifier, prompt, monkeypatch):
    fed = []

    def watched(steppers, blocks, **kwargs):
        fed.append(len(steppers))
        return feed_together(steppers, blocks, **kwargs)

    monkeypatch.setattr("bdcore.targets.generate.feed_together", watched)
    continuations(verifier, [prompt(5) for _ in range(5)], new_tokens=8, batch_size=2)
    assert fed == [2] * 14 + [1] * 7  # a row's first token comes from its prompt


def test_rows_come_in_the_order_of_the_prompts_as_soon_as_they_can(verifier, prompt):
    prompts = [prompt(n) for n in (9, 5, 20)]
    free = [plain_greedy(verifier, ids, 16) for ids in prompts]
    _, eos = first_only([free[1], free[0], free[2]])
    told = []
    rows = generated(verifier, prompts, new_tokens=16, top_k=1, eos={eos}, batch_size=2, on_tokens=told.append)
    assert next(rows).ids == free[0]  # the second ended before, and waits for it
    assert len(told) == 16
    assert next(rows).finish_reason == "eos"
    assert len(told) == 16
    assert next(rows).ids == free[2]
    assert next(rows, None) is None


def test_eos_as_the_last_token_that_fits_is_an_eos(verifier, prompt):
    ids = prompt(20)
    free = plain_greedy(verifier, ids, 16)
    at, eos = first_only([free])
    (greedy,) = continuations(verifier, [ids], new_tokens=at + 1, eos={eos})
    assert (greedy.ids, greedy.finish_reason) == (free[: at + 1], "eos")


def test_generation_stops_when_every_row_has_ended(verifier, prompt):
    ids = prompt(20)
    first = plain_greedy(verifier, ids, 1)[0]
    told = []
    rows = continuations(verifier, [ids, ids], new_tokens=16, eos={first}, on_tokens=told.append)
    assert [r.ids for r in rows] == [[first], [first]]
    assert told == [2]


def test_forced_targets_say_how_far_they_are(verifier, prompt):
    told = []
    forced(verifier, prompt(70), top_k=1, chunk=32, on_tokens=told.append)
    assert told == [32, 64, 70]


def test_log_probabilities_are_fp32_of_the_whole_vocabulary():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    ids, logprobs = top_logprobs(logits.bfloat16(), 2)
    total = math.log(sum(math.exp(x) for x in (1, 3, 2, 0)))
    assert ids.tolist() == [[1, 2]]
    assert logprobs.dtype == torch.float32
    assert logprobs[0].tolist() == pytest.approx([3 - total, 2 - total], abs=1e-5)


@pytest.mark.parametrize("k", [1, 2, 8])
def test_of_equal_logits_the_first_is_the_one_that_decoding_chooses(k):
    """bf16 rounds logits to few values: many positions have their best one several times, often more than k times."""
    logits = (torch.randn(512, 4096, generator=torch.Generator().manual_seed(0)) / 8 + 40).bfloat16()
    ids, logprobs = top_logprobs(logits, k)
    assert (logits == logits.amax(-1, keepdim=True)).sum(-1).float().mean() > 2
    assert torch.equal(ids[:, 0], logits.argmax(-1))
    assert all(len(set(row)) == k for row in ids.tolist())
    expected = logits.float().log_softmax(-1)
    torch.testing.assert_close(logprobs, expected.gather(-1, ids))
    torch.testing.assert_close(logprobs, expected.topk(k).values)


def test_a_row_keeps_the_eos_and_the_reason_of_its_target():
    greedy = Greedy([5, 6, 7, 2], [[5], [6], [7], [2]], [[-0.1]] * 4, "eos")
    made = row(Prompt("d", "folder", 0, [1, 2, 3], False), greedy, "generated")
    assert made["target_ids"] == [5, 6, 7, 2]
    assert made["finish_reason"] == "eos"


# --- the task


class Told:
    """Stands in for `Progress`: what the task has said."""

    every: ClassVar[list["Told"]] = []

    def __init__(self, key, what, total, unit, *, done=0.0):
        self.what, self.total, self.unit, self.begun, self.done = what, total, unit, done, []
        Told.every.append(self)

    def __call__(self, done):
        self.done.append(done)


@pytest.fixture
def opened(tmp_path, monkeypatch):
    """Opens a tiny study, some of whose texts are there under two names; the task runs outside of a flow."""
    path = write_study(tmp_path / "study")
    for name in ("text-00", "text-01", "text-03"):  # of the training split under either name
        copy = tmp_path / "study" / "texts" / f"{name}-again.txt"
        copy.write_text((tmp_path / "study" / "texts" / f"{name}.txt").read_text())
    monkeypatch.setenv("BUDGETDRAFT_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module, "Progress", Told)
    monkeypatch.setattr(module, "eos_ids", lambda model, tokenizer: NEVER)  # continuations of a known length
    monkeypatch.setattr(Told, "every", [])
    with disable_run_logger():
        yield lambda *overrides: open_study(str(path), list(overrides))


def make(study):
    ref = prepare_verifier.fn(study)
    made = generate_targets.fn(study, ref)
    return made, read_manifest(Path(made.path))


def contents(path):
    rows = [r for p in sorted(Path(path).glob("part-*.parquet")) for r in pq.ParquetFile(p).read().to_pylist()]
    return [{k: v for k, v in r.items() if k != "topk_logprobs"} for r in rows]


def test_the_task_makes_both_modes_and_says_how_fast(opened):
    study = opened()
    ref, manifest = make(study)
    assert (ref.rows, ref.reused) == (6, False)
    rows = contents(ref.path)
    assert [(r["mode"], len(r["prompt_ids"])) for r in rows] == [("forced", 160)] * 4 + [("generated", 96)] * 2
    assert manifest["tokens"] == sum(len(r["target_ids"]) for r in rows) == 4 * 160 + 2 * 32
    for mode, tokens in (("forced", 4 * 160), ("generated", 2 * 32)):
        assert manifest[f"{mode}_tokens"] == tokens
        assert manifest[f"{mode}_tokens_per_s"] == pytest.approx(tokens / manifest[f"{mode}_seconds"])
    assert [(t.what, t.unit, t.total, t.done) for t in Told.every] == [
        ("targets, forced", "tokens", 640, [160, 320, 480, 640]),
        ("targets, generated", "tokens", 64, list(range(2, 65, 2))),
    ]
    assert make(study)[0] == replace(ref, reused=True)


def test_finished_shards_of_a_killed_run_are_kept_and_the_rest_is_the_same(opened, monkeypatch):
    study = opened("targets.forced=5", "targets.generated=4", "targets.batch_size=3")
    clean = contents(make(study)[0].path)
    shutil.rmtree(study.workspace.root)
    write, written = module.write_rows, []

    def killed(path, *args, **kwargs):
        if len(written) == 4:
            raise KeyboardInterrupt
        written.append(path)
        return write(path, *args, **kwargs)

    monkeypatch.setattr(module, "write_rows", killed)
    with pytest.raises(KeyboardInterrupt):
        make(study)
    assert [p.name for p in written] == [f"part-{n}.parquet" for n in SHARDS[:4]]
    before = {p: p.stat().st_mtime_ns for p in written}
    damaged = written[3]
    damaged.write_bytes(damaged.read_bytes()[:100])
    monkeypatch.setattr(module, "write_rows", write)
    Told.every.clear()
    ref, manifest = make(study)
    assert contents(ref.path) == clean
    assert {p: p.stat().st_mtime_ns for p in written[:3]} == {p: before[p] for p in written[:3]}
    # Nothing forced was made in this run, and all of what is generated.
    assert (manifest["forced_tokens_per_s"], manifest["forced_tokens"]) == (None, None)
    assert manifest["generated_tokens"] == 4 * 32
    assert manifest["tokens"] == 5 * 160 + 4 * 32
    assert [(t.what, t.begun) for t in Told.every] == [("targets, generated", 0)]


@pytest.mark.parametrize("at", [0.02, 0.3, 0.6, 0.98])
def test_a_finished_shard_that_changed_at_its_size_is_made_again_and_the_others_are_kept(opened, at):
    study = opened()
    ref, _ = make(study)
    clean, folder = contents(ref.path), Path(ref.path)
    before = {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")}
    damaged = folder / "part-forced-00001.parquet"
    content = bytearray(damaged.read_bytes())
    content[int(at * len(content))] ^= 0x55
    damaged.write_bytes(content)
    assert read_manifest(folder) is not None, "its size is right"
    Told.every.clear()
    made, _ = make(study)
    assert (contents(made.path), made.reused) == (clean, False)
    after = {path.name: path.stat().st_mtime_ns for path in folder.glob("part-*")}
    assert {name for name in after if after[name] != before[name]} == {damaged.name}
    assert make(study)[0].reused


SHARDS = ["forced-00000", "forced-00001", "forced-00002", "generated-00000", "generated-00001"]


def test_a_resumed_run_counts_what_an_earlier_one_made(opened):
    study = opened()
    ref, _ = make(study)
    for name in ("manifest.json", "part-forced-00001.parquet"):
        (Path(ref.path) / name).unlink()
    Told.every.clear()
    _, manifest = make(study)
    assert [(t.what, t.begun, t.done[-1], t.total) for t in Told.every] == [("targets, forced", 320, 640, 640)]
    assert (manifest["forced_tokens"], manifest["generated_tokens"]) == (320, None)
    assert manifest["tokens"] == 4 * 160 + 2 * 32


def test_rows_that_end_early_shorten_what_is_left(opened, monkeypatch):
    study = opened()
    free = [r["target_ids"] for r in contents(make(study)[0].path) if r["mode"] == "generated"]
    at, eos = first_only(free, 1, 30)
    shutil.rmtree(study.workspace.root)
    monkeypatch.setattr(module, "eos_ids", lambda model, tokenizer: {eos})
    Told.every.clear()
    ref, manifest = make(study)
    assert [r["finish_reason"] for r in contents(ref.path)[4:]] == ["eos", "length"]
    assert manifest["generated_tokens"] == Told.every[1].total == Told.every[1].done[-1] == at + 1 + 32


def test_texts_that_repeat_another_are_replaced_by_the_next(opened):
    wanted = len({d.text for d in opened().inputs.training})
    study = opened(f"targets.forced={wanted}")
    copies = len(study.inputs.training) - wanted
    assert copies > 0, "no copy is in the training split, so the test shows nothing"
    ref, manifest = make(study)
    rows = [r for r in contents(ref.path) if r["mode"] == "forced"]
    assert len({tuple(r["prompt_ids"]) for r in rows}) == len(rows) == wanted
    assert manifest["duplicates"] == {"forced": copies - 1, "generated": 0}, "one is drawn after all that are wanted"


def test_more_than_there_are_distinct_texts_is_refused_by_field(opened):
    study = opened(f"targets.forced={len(opened().inputs.training)}")
    with pytest.raises(ConfigError, match=r"^targets.length = 160: \d+ distinct prompts of 160 tokens"):
        make(study)


def test_a_document_of_the_grid_among_the_prompts_stops_the_task_before_the_verifier_runs(opened, monkeypatch):
    study = opened()
    leaked = contents(make(study)[0].path)[0]["doc_id"]
    document = next(d for d in study.inputs.training if d.doc_id == leaked)
    study = replace(study, inputs=replace(study.inputs, corpora=[*study.inputs.corpora, [document]]))
    shutil.rmtree(study.workspace.root)
    monkeypatch.setattr(module, "load_model", None)
    with pytest.raises(ValueError, match=rf"\['{leaked}'\] are in grid.corpus too"):
        make(study)
    assert not list(study.workspace.root.rglob("part-*"))
