"""The verifier's greedy tokens: the same for every chunk size and batch, with their log-probabilities, as rows."""

import math

import pytest
import torch

from bdcore.documents import Prompt
from bdcore.schema import TARGETS, write_rows
from bdcore.targets.generate import Greedy, forced, generated, top_logprobs
from bdcore.targets.rows import document_ids, read_targets, row
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


def test_rows_generated_together_equal_rows_generated_one_by_one(verifier, prompt):
    prompts = [prompt(20) for _ in range(5)]
    together = generated(verifier, prompts, new_tokens=24, top_k=3, eos=NEVER)
    for ids, row_of_batch in zip(prompts, together, strict=True):
        single = generated(verifier, [ids], new_tokens=24, top_k=3, eos=NEVER)[0]
        assert row_of_batch.ids == single.ids
        assert row_of_batch.topk_ids == single.topk_ids
        close(row_of_batch.topk_logprobs, single.topk_logprobs)


def test_generated_targets_are_the_forced_targets_of_their_own_text(verifier, prompt):
    ids = prompt(20)
    text = generated(verifier, [ids], new_tokens=24, top_k=2, eos=NEVER)[0]
    again = forced(verifier, [*ids, *text.ids[:-1]], top_k=2)
    assert again.ids[19:] == text.ids
    close(again.topk_logprobs[19:], text.topk_logprobs)


def test_prompts_of_several_lengths_are_refused_rather_than_padded(verifier, prompt):
    with pytest.raises(ValueError, match=r"prompts of one length are needed, got lengths \[20, 50, 90\]"):
        generated(verifier, [prompt(20), prompt(90), prompt(50)], new_tokens=4, top_k=1, eos=NEVER)


def test_eos_is_kept_ends_its_row_alone_and_none_is_invented(verifier, prompt):
    prompts = [prompt(20) for _ in range(4)]
    free = [g.ids for g in generated(verifier, prompts, new_tokens=16, top_k=1, eos=NEVER)]
    eos = free[0][5]
    expected = [ids[: ids.index(eos) + 1] if eos in ids else ids for ids in free]
    rows = generated(verifier, prompts, new_tokens=16, top_k=1, eos={eos})
    assert [r.ids for r in rows] == expected
    assert rows[0].finish_reason == "eos"
    assert rows[0].ids[-1] == eos
    reasons = {"eos" if eos in ids else "length" for ids in free}
    assert reasons == {"eos", "length"}, "both must occur, or the test shows little"
    for r, ids in zip(rows, expected, strict=True):
        assert r.finish_reason == ("eos" if ids[-1] == eos else "length")
        assert len(r.topk_ids) == len(r.topk_logprobs) == len(ids)


def test_eos_as_the_last_token_that_fits_is_an_eos(verifier, prompt):
    ids = prompt(20)
    free = generated(verifier, [ids], new_tokens=16, top_k=1, eos=NEVER)[0].ids
    at = next(i for i in range(3, 16) if free.index(free[i]) == i)
    greedy = generated(verifier, [ids], new_tokens=at + 1, top_k=1, eos={free[at]})[0]
    assert (greedy.ids, greedy.finish_reason) == (free[: at + 1], "eos")


def test_generation_stops_when_every_row_has_ended(verifier, prompt):
    ids = prompt(20)
    first = generated(verifier, [ids], new_tokens=1, top_k=1, eos=NEVER)[0].ids[0]
    steps = []
    rows = generated(verifier, [ids, ids], new_tokens=16, top_k=1, eos={first}, on_step=steps.append)
    assert [r.ids for r in rows] == [[first], [first]]
    assert steps == [1]


def test_log_probabilities_are_fp32_of_the_whole_vocabulary():
    logits = torch.tensor([[1.0, 3.0, 2.0, 0.0]])
    ids, logprobs = top_logprobs(logits.bfloat16(), 2)
    total = math.log(sum(math.exp(x) for x in (1, 3, 2, 0)))
    assert ids.tolist() == [[1, 2]]
    assert logprobs.dtype == torch.float32
    assert logprobs[0].tolist() == pytest.approx([3 - total, 2 - total], abs=1e-5)


# --- rows


def test_rows_come_back_in_shard_order_with_their_documents(verifier, prompt, tmp_path):
    prompts = [Prompt(f"doc-{i}", "stdlib", 8 * i, prompt(16), truncated=i > 0) for i in range(3)]
    made = [row(p, forced(verifier, p.ids, top_k=2), "forced") for p in prompts]
    write_rows(tmp_path / "part-forced-00001.parquet", made[2:], TARGETS)
    write_rows(tmp_path / "part-forced-00000.parquet", made[:2], TARGETS)
    back = read_targets(tmp_path)
    assert [r["doc_id"] for r in back] == ["doc-0", "doc-1", "doc-2"]
    for mine, theirs, p in zip(back, made, prompts, strict=True):
        assert mine["prompt_ids"] == p.ids
        assert mine["target_ids"] == theirs["target_ids"] == forced(verifier, p.ids, top_k=1).ids
        assert (mine["mode"], mine["finish_reason"], mine["truncated"]) == ("forced", "length", p.truncated)
        close(mine["topk_logprobs"], theirs["topk_logprobs"])
    assert document_ids(tmp_path) == {"doc-0", "doc-1", "doc-2"}


def test_a_row_keeps_the_eos_and_the_reason_of_its_target():
    greedy = Greedy([5, 6, 7, 2], [[5], [6], [7], [2]], [[-0.1]] * 4, "eos")
    made = row(Prompt("d", "folder", 0, [1, 2, 3], False), greedy, "generated")
    assert made["target_ids"] == [5, 6, 7, 2]
    assert made["finish_reason"] == "eos"
