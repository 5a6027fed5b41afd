"""Training windows: labels with EOS kept, three kinds of sequence, draws by (seed, step) alone."""

import random
from collections import Counter

import numpy as np
import pytest
import torch

from bdcore.config import ConfigError, MixtureConfig
from bdcore.runtime import seed_for
from bdcore.targets.rows import TargetRows
from bdcore.training.batches import Sampler, collate, from_row, head_index, repeated
from bdcore.training.losses import IGNORE, UNSAYABLE
from tests.unit.training_helpers import forced_row, generated_row, rows, window

EOS = 2


def sampler(mixture=None, seed=0, extra=()):
    mixture = MixtureConfig(**(mixture or {"forced": 1}))
    found = TargetRows.of([*rows(4), *extra])
    return Sampler(found, range(len(found)), mixture, seed)


def tokens_of(row):
    return from_row(TargetRows.of([row])[0])


def parts(tokens):
    return [part.tolist() for part in (tokens.ids, tokens.labels, tokens.topk_ids, tokens.topk_logprobs)]


def test_eos_label_stays_and_filling_is_unsupervised():
    """B26: targets 5 6 7 EOS, filled up with EOS's own id to length 6 after the prompt."""
    tokens = tokens_of(generated_row(0, [9], [5, 6, 7, EOS], "eos")).window(0, 6)
    assert tokens.labels.tolist() == [5, 6, 7, EOS, IGNORE, IGNORE]
    assert tokens.ids[:4].tolist() == [9, 5, 6, 7] and len(tokens) == 6
    assert tokens.topk_ids[3][0] == EOS and (tokens.topk_ids[4:] == IGNORE).all() and len(tokens.topk_ids) == 6


def test_no_eos_is_invented_for_a_target_that_hit_the_length_limit():
    tokens = tokens_of(generated_row(0, [9, 8], [5, 6, 7], "length"))
    assert tokens.labels.tolist() == [IGNORE, 5, 6, 7] and tokens.ids.tolist() == [9, 8, 5, 6]


def test_generated_row_is_supervised_on_its_continuation_and_a_forced_one_everywhere():
    tokens = tokens_of(generated_row(0, [9, 8, 7], [5, 6], "length"))
    assert tokens.labels.tolist() == [IGNORE, IGNORE, 5, 6]
    assert (tokens.topk_ids == IGNORE).all(1).tolist() == [True, True, False, False]
    row = forced_row(1)
    assert parts(tokens_of(row))[:2] == [row["prompt_ids"], row["target_ids"]]


def test_every_part_of_a_window_has_its_length_and_place():
    whole = tokens_of(forced_row(3))
    cut = whole.window(5, 10)
    assert parts(cut) == [part[5:15] for part in parts(whole)]


def test_repeated_passage_has_the_copy_as_its_label():
    tokens = repeated(np.array([11, 12, 13], np.int32), 8, 2)
    assert tokens.ids.tolist() == [11, 12, 13, 11, 12, 13, 11, 12]
    assert tokens.labels.tolist() == [IGNORE, IGNORE, 11, 12, 13, 11, 12, 13]
    supervised = [(i, label) for i, label in enumerate(tokens.labels[:-1]) if label != IGNORE]
    assert all(tokens.ids[i + 1] == label for i, label in supervised)
    assert tokens.topk_ids.tolist() == [[IGNORE] * 2] * 8


@pytest.mark.parametrize("passage", [1, 5, 8, 20])
def test_repeated_passage_of_any_length_fills_every_part(passage):
    tokens = repeated(np.arange(passage, dtype=np.int32), 8, 2)
    assert {len(tokens.ids), len(tokens.labels), len(tokens.topk_ids), len(tokens.topk_logprobs)} == {8}


@pytest.mark.parametrize("kind", ["forced", "generated", "repeated"])
@pytest.mark.parametrize("length", [8, 17, 48])
def test_windows_of_every_kind_have_the_wanted_length(kind, length):
    extra = [generated_row(9, list(range(3, 23)), [5] * 29, "length")]
    source = sampler({"forced": 0, kind: 1}, extra=extra)
    for step in range(10):
        tokens = source.draw(step, 0, length)
        assert {len(tokens.ids), len(tokens.labels), len(tokens.topk_ids), len(tokens.topk_logprobs)} == {length}


def test_generated_rows_are_used_at_their_whole_length_and_with_their_eos():
    """The longest legal window is prompt + continuation, one more than a row has inputs."""
    whole = generated_row(8, list(range(3, 13)), [40] * 6, "length")
    ended = generated_row(9, list(range(3, 13)), [50, 51, EOS], "eos")
    source = sampler({"forced": 0, "generated": 1}, extra=[whole, ended])
    drawn = [source.draw(step, 0, 16) for step in range(20)]
    assert any(t.labels.tolist() == [IGNORE] * 9 + [40] * 6 + [IGNORE] for t in drawn)
    assert any(t.labels.tolist() == [IGNORE] * 9 + [50, 51, EOS] + [IGNORE] * 4 for t in drawn)


@pytest.mark.parametrize("length", [4, 16, 40])
def test_every_window_of_a_generated_row_ends_on_a_label(length):
    source = sampler({"forced": 0, "generated": 1}, extra=[generated_row(9, list(range(3, 43)), [5] * 21, "length")])
    drawn = [source.draw(step, 0, length) for step in range(300)]
    assert all(tokens.labels[-1] == 5 for tokens in drawn)
    # From the first label to the last: the whole continuation is drawn from.
    assert {int((tokens.labels == 5).sum()) for tokens in drawn} == set(range(1, min(length, 21) + 1))


def test_windows_of_forced_rows_start_anywhere():
    """By the draws of every run so far."""
    source = sampler(seed=7)
    for step in range(20):
        rng = random.Random(seed_for(7, "window", step, 1))
        rng.choices("fgr", [1, 0, 0])
        row, start = rng.choice(rows(4)), rng.randrange(48 - 20 + 1)
        assert source.draw(step, 1, 20).ids.tolist() == row["prompt_ids"][start : start + 20]


@pytest.mark.parametrize(
    ("kind", "left"), [("generated", "forced"), ("forced", "generated"), ("repeated", "generated")]
)
def test_a_kind_of_which_validation_leaves_nothing_is_refused(kind, left):
    found = TargetRows.of([forced_row(0), generated_row(0, [3] * 9, [5] * 9, "length")])
    use = [i for i, mode in enumerate(found.modes) if mode == left]
    source = "generated" if kind == "generated" else "forced"
    with pytest.raises(ConfigError, match=rf"mixture.{kind} = 0.25: .*raise targets.{source}, lower validation.seq"):
        Sampler(found, use, MixtureConfig(**{"forced": 0, left: 1, kind: 0.25}), 0)


def test_kinds_come_in_the_proportions_of_the_mixture():
    extra = [generated_row(9, [3] * 30, [5] * 30, "length")]
    source = sampler({"forced": 0.5, "generated": 0.3, "repeated": 0.2}, extra=extra)
    kinds = Counter()
    for step in range(600):
        tokens = source.draw(step, 0, 32)
        copied = all(label in (IGNORE, after) for label, after in zip(tokens.labels, tokens.ids[1:], strict=False))
        kinds["generated" if set(tokens.ids.tolist()) <= {3, 5} else "repeated" if copied else "forced"] += 1
    assert [round(kinds[k] / 600, 1) for k in ("forced", "generated", "repeated")] == [0.5, 0.3, 0.2]


def test_windows_are_functions_of_seed_step_and_index_alone():
    mixture = {"forced": 0.6, "repeated": 0.4}
    a, b = sampler(mixture), sampler(mixture)
    forward = [parts(a.draw(step, index, 20)) for step in range(8) for index in range(2)]
    for step in reversed(range(8)):
        for index in (1, 0):
            assert parts(b.draw(step, index, 20)) == forward[2 * step + index]
    assert len({tuple(ids) for ids, *_ in forward}) > 12
    assert [parts(sampler(mixture, seed=1).draw(s, 0, 20)) for s in range(8)] != forward[::2]


def test_pruned_head_gets_its_own_labels_and_what_it_cannot_say_is_not_supervised():
    ids = torch.tensor([3, 10, 11])
    index = head_index(ids, 128)
    assert index.shape == (128,) and index[ids].tolist() == [0, 1, 2] and int((index >= 0).sum()) == 3
    tokens = window([1, 2, 3, 4], [10, 12, IGNORE, 3])
    batch = collate([tokens], index, "cpu")
    assert batch.targets.labels.tolist() == [[1, UNSAYABLE, IGNORE, 0]]
    assert (batch.targets.tokens, batch.targets.known) == (2, 3)
    assert batch.targets.topk_ids.tolist() == [[[1, 2, -1], [-1, -1, -1], [-1, -1, -1], [0, -1, -1]]]
    assert batch.ids_BT.tolist() == [[1, 2, 3, 4]]


def test_whole_head_keeps_the_verifiers_labels():
    batch = collate([window([1, 2], [10, IGNORE])], head_index(None, 128), "cpu")
    assert batch.targets.labels.tolist() == [[10, IGNORE]]
