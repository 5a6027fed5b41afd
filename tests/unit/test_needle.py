"""Needles: where they stand in a prompt of any length, what is asked, and that nothing else of the text changes."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from bdcore.config import Config, ConfigError, CorpusConfig, GridConfig, load_config
from bdcore.decoding.lookup import Occurrences
from bdcore.documents import Document, Prompt, build_prompts, check_corpus, documents_key, encode, load_documents
from bdcore.documents.needle import hidden
from bdcore.evaluation.texts import documents_of, prompts_of
from bdcore.preflight import check_tokens, inputs
from tests.tiny import byte_tokenizer, write_corpus, write_study
from tests.unit.test_documents import error_of, write_jsonl
from tests.unit.tokenizers import piece_tokenizer, unsplit_tokenizer

BYTES = byte_tokenizer()
LINE = 60


def write_prose(folder: Path, count: int = 24, lines: int = 80) -> Path:
    """Numbered lines of at most LINE bytes, some of them with the end of a sentence inside."""
    folder.mkdir(parents=True)
    for i in range(count):
        text = "".join(f"Line {n} of text {i} goes on. Then it\nis over and done with\n\n" for n in range(lines))
        (folder / f"text-{i:02d}.txt").write_text(text)
    return folder


@pytest.fixture(scope="module")
def prose(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prose(tmp_path_factory.mktemp("prose") / "texts")


def needles(prose: Path, **changes: Any) -> CorpusConfig:
    return CorpusConfig(source="needle", filler="folder", path=str(prose), **{"split": "test", **changes})


def load_hidden(fillers: list[Document], **changes: Any) -> list[Document]:
    return hidden(fillers, CorpusConfig(source="needle", **changes))


def built(documents: list[Document], length: int, tokenizer: Any = BYTES, count: int | None = None) -> list[Prompt]:
    return build_prompts(documents, tokenizer, length=length, count=count or len(documents), seed=3).prompts


def named(documents: list[Document], prompt: Prompt) -> Document:
    return next(d for d in documents if d.doc_id == prompt.doc_id)


def hay(document: Document, prompt: Prompt) -> str:
    """The prompt's part of the text, needles taken out again."""
    text = BYTES.decode(prompt.ids)
    text = text[text.index("\n\n") + 2 : text.rindex("\n\nQuestion:")]
    for needle in document.needles:
        alone = re.compile(rf"^{needle.sentence}\n|[ \n]{needle.sentence}")
        assert len(alone.findall(text)) == 1, "each needle once, whole, set off from the text"
        text = alone.sub("", text)
    return text


@pytest.mark.parametrize("length", [700, 1500, 3000])
def test_the_text_of_a_prompt_is_its_fillers_with_needles_between_lines_and_sentences(prose, length):
    documents = load_documents(needles(prose, depths=[0, 0.3, 0.5, 1]))
    for prompt in built(documents, length):
        document = named(documents, prompt)
        assert len(prompt.ids) == length and prompt.truncated
        assert document.text.startswith(hay(document, prompt))
        before = BYTES.decode(prompt.ids[: -prompt.evidence_distance])
        assert before.endswith(("follows.\n\n", "goes on.", "Then it", "done with", "done with\n"))


@pytest.mark.parametrize("length", [700, 1500, 3000])
@pytest.mark.parametrize("depth", [0, 0.1, 0.5, 0.9, 1])
def test_a_needle_stands_at_its_depth_at_every_length(prose, length, depth):
    documents = load_documents(needles(prose, depths=[depth]))
    for prompt in built(documents, length):
        document = named(documents, prompt)
        whole = BYTES.decode(prompt.ids)
        at = whole.index(document.evidence.sentence) - whole.index("\n\n") - 2
        wanted = depth * len(hay(document, prompt))
        assert wanted - LINE <= at <= wanted + 1, "the last line or sentence that ends before it"
        assert (at == 0) == (depth == 0)


@pytest.mark.parametrize("tokenizer", [BYTES, piece_tokenizer(), unsplit_tokenizer()], ids=["bytes", "bpe", "unsplit"])
def test_the_evidence_is_as_many_tokens_back_as_the_prompt_says(prose, tokenizer):
    documents = load_documents(needles(prose))
    for length in (500, 1200):
        for prompt in built(documents, length, tokenizer):
            document = named(documents, prompt)
            assert len(prompt.ids) == length
            evidence, rest = prompt.ids[-prompt.evidence_distance :], prompt.ids[: -prompt.evidence_distance]
            sentence = encode(tokenizer, document.evidence.sentence, after=True)
            assert evidence[1 : 1 + len(sentence)] == sentence or evidence[: len(sentence)] == sentence
            assert document.evidence.answer not in tokenizer.decode(rest)


def test_each_depth_lies_as_far_back_as_it_should(prose):
    documents = load_documents(needles(prose, depths=[0.1, 0.5, 0.9]))
    far = {named(documents, p).evidence.depth: p.evidence_distance / 3000 for p in built(documents, 3000)}
    assert far[0.1] > 0.85 > 0.6 > far[0.5] > 0.45 > 0.2 > far[0.9]


def test_the_answer_is_due_where_the_prompt_ends(prose):
    """What followed the prompt's last words where they stood before is the number that is asked for, and no other."""
    documents = load_documents(needles(prose))
    for prompt in built(documents, 900):
        evidence = named(documents, prompt).evidence
        assert BYTES.decode(prompt.ids).endswith(f"\nAnswer: {evidence.lead}")
        followed = Occurrences(len(evidence.lead)).draft(prompt.ids, len(evidence.answer) + 2)
        assert BYTES.decode(followed) == f" {evidence.answer}."


def test_documents_ask_for_each_depth_in_turn_and_hold_a_number_at_each(prose):
    documents = load_documents(needles(prose, split="train"))
    depths = [d.evidence.depth for d in documents]
    assert max(map(depths.count, (0.1, 0.5, 0.9))) - min(map(depths.count, (0.1, 0.5, 0.9))) <= 1
    for document in documents:
        assert [needle.depth for needle in document.needles] == [0.1, 0.5, 0.9]
        assert len({needle.lead for needle in document.needles}) == 3
        assert sum(needle.asked for needle in document.needles) == 1
        name = re.fullmatch("The secret number of the (.*) is", document.evidence.lead)[1]
        assert document.question == f"What is the secret number of the {name}?"


def test_prompts_ask_for_each_depth_as_often_however_many_documents_are_too_short(tmp_path):
    """Of texts that ask for depth 0.5, all but three are too short."""
    fillers = [Document(f"text-{i}", "file", "One line.\n" * 200) for i in range(40)]
    made = load_hidden(fillers, depths=[0.1, 0.5])
    short = [d for d in made if d.evidence.depth == 0.5][3:]
    documents = [replace(d, text="One line.\n") if d in short else d for d in made]
    for count in (2, 4, 6):
        prompts = build_prompts(documents, BYTES, length=800, count=count, seed=0).prompts
        depths = [named(documents, prompt).evidence.depth for prompt in prompts]
        assert depths.count(0.1) == depths.count(0.5) == count // 2
    found = build_prompts(documents, BYTES, length=800, count=12, seed=0)
    assert len(found.prompts) == 12 and found.too_short > 0, "where one depth has no more, another's are taken"


def test_other_documents_are_drawn_as_they_would_be_without_needles(prose):
    plain = load_documents(CorpusConfig(source="folder", path=str(prose), split="test"))
    alone = [p.doc_id for p in built(plain, 200)]
    mixed = [*plain, *load_documents(needles(prose))]
    assert {p.doc_id for p in built(mixed, 800)} == {d.doc_id for d in mixed}
    assert set(alone) == {d.doc_id for d in plain}


def test_the_same_documents_serve_every_context(prose):
    grid = GridConfig(corpus=[needles(prose)], contexts=[500, 1000, 2000], prompts=3)
    corpora = [load_documents(needles(prose))]
    names = [p.doc_id for p in documents_of(grid, corpora, BYTES, 1)]
    for context in grid.contexts:
        prompts = prompts_of(grid, corpora, BYTES, 1, context)
        assert {p.doc_id for p in prompts} == set(names) and {len(p.ids) for p in prompts} == {context}
        assert len({named(corpora[0], p).evidence.depth for p in prompts}) == 3


# Names and numbers


def test_needles_are_the_same_on_every_run_and_others_with_another_seed(prose):
    draws = [load_documents(needles(prose, seed=seed)) for seed in (0, 0, 1)]
    assert draws[0] == draws[1] and documents_key(draws[0]) == documents_key(draws[1])
    assert [d.doc_id for d in draws[2]] == [d.doc_id for d in draws[0]]
    assert documents_key(draws[2]) != documents_key(draws[0])
    assert all(a.needles != b.needles for a, b in zip(draws[0], draws[2], strict=True))


def test_a_text_keeps_its_names_and_numbers_when_others_come_and_go(tmp_path):
    fillers = [Document(f"text-{i}", "file", "One line.\n") for i in range(6)]
    facts = [{(n.lead, n.answer) for n in d.needles} for d in load_hidden(fillers)]
    assert facts[3:] == [{(n.lead, n.answer) for n in d.needles} for d in load_hidden(fillers[3:])]


def test_splits_share_no_text_no_name_and_no_number(prose):
    train, test = (load_documents(needles(prose, split=split)) for split in ("train", "test"))
    assert len(train) + len(test) == 24 and train and test
    for of in (lambda d: {d.origin}, lambda d: {n.lead for n in d.needles}, lambda d: {n.answer for n in d.needles}):
        assert not set.union(*map(of, train)) & set.union(*map(of, test))
    assert all(re.fullmatch(r"[1-9]\d{5}", n.answer) for d in train for n in d.needles)


def test_depths_change_the_identity_of_documents(prose):
    one, other = (load_documents(needles(prose, depths=[depth])) for depth in (0.2, 0.8))
    assert documents_key(one) != documents_key(other)
    assert not {d.doc_id for d in one} & {d.doc_id for d in other}, "so that both may stand in one grid"


def test_any_corpus_hides_needles_and_its_own_questions_are_not_asked(tmp_path):
    rows = [{"document_id": f"d{i}", "document_text": f"Story {i}. " * 99, "question": "who?"} for i in range(20)]
    path = write_jsonl(tmp_path / "stories.jsonl", rows)
    documents = load_documents(CorpusConfig(source="needle", filler="lwm", path=str(path)))
    assert {d.source for d in documents} == {"needle"} and all("who" not in d.question for d in documents)
    assert all(re.fullmatch(r"needle@0\.[159]/lwm/d\d+", d.doc_id) and d.origin.startswith("lwm/") for d in documents)
    assert {d.filler for d in load_documents(CorpusConfig(source="needle", split="test"))} >= {"stdlib/posixpath.py"}


def test_only_a_hub_filler_needs_a_network():
    for corpus, offline in (({}, True), ({"filler": "pg19"}, False), ({"filler": "pg19", "path": "books"}, True)):
        assert CorpusConfig(source="needle", **corpus).offline is offline
    assert CorpusConfig(source="stdlib").offline and not CorpusConfig(source="lwm").offline


# Bad input


def test_a_context_without_room_for_needles_and_question_says_how_many_tokens_they_take(prose):
    documents = load_documents(needles(prose))
    message = error_of(lambda: built(documents, 300))
    found = re.search(
        r"context = 300: the instruction, 3 needles and question of (\S+) alone take (\d+) tokens", message
    )
    assert found and "a larger context or fewer depths" in message
    least = [d for d in documents if d.doc_id == found[1]]
    assert "300" not in found[2] and error_of(lambda: built(least, int(found[2])))
    (prompt,) = built(least, int(found[2]) + 10)
    assert BYTES.decode(prompt.ids).count("The secret number of") == 4


def test_a_text_too_short_for_the_context_is_counted_not_filled_up(prose):
    documents = load_documents(needles(prose))
    message = error_of(lambda: built(documents, 9000))
    longest = int(re.search(r"longest of these has (\d+) tokens", message)[1])
    assert f"{len(documents)} are too short" in message
    assert 80 * 60 < longest < 9000


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"depths": [0.5, 1.5]}, "corpus.0.depths.1 = 1.5"),
        ({"depths": [0.5, 0.5]}, "each once"),
        ({"depths": []}, "corpus.0.depths = []"),
        ({"depths": "deep"}, "depths.0 = 'deep'"),
        ({"seed": -1}, "corpus.0.seed = -1"),
        ({"filler": "needle"}, "corpus.0.filler = 'needle': Input should be 'stdlib'"),
        ({"source": "stdlib", "depths": [0.5]}, "depths = [0.5]: source `stdlib` has none; only `needle` has"),
        ({"source": "stdlib", "filler": "pg19"}, "filler = pg19: source `stdlib` has none; only `needle` has"),
        ({"source": "pg19", "seed": 3}, "seed = 3: source `pg19` has none"),
    ],
)
def test_settings_that_make_no_needles_are_refused_in_one_line(tmp_path, settings, named):
    (tmp_path / "study.yaml").write_text(yaml.safe_dump({"grid": {"corpus": {"source": "needle", **settings}}}))
    assert named in error_of(lambda: load_config(tmp_path / "study.yaml"))


def test_faults_of_the_filler_are_told_as_the_fillers(tmp_path):
    message = error_of(lambda: check_corpus(CorpusConfig(source="needle", filler="folder")))
    assert message.startswith("corpus.path is not set: filler `folder` needs a folder")
    missing = CorpusConfig(source="needle", filler="pg19", path=str(tmp_path / "gone"))
    assert f"corpus.path = {tmp_path / 'gone'}" in error_of(lambda: load_documents(missing))
    taken = CorpusConfig(source="needle", path=str(tmp_path))
    assert "filler `stdlib` takes none" in error_of(lambda: check_corpus(taken))


def test_a_replay_of_needles_is_refused_by_name():
    for workloads in (["replay"], ["greedy", "replay"]):
        with pytest.raises(ValueError, match=r"source = needle: `replay` reads .* use workloads = \[greedy\]"):
            GridConfig(corpus=[CorpusConfig(source="needle")], workloads=workloads)
    assert GridConfig(corpus=[CorpusConfig(source="needle")], workloads=["greedy"]).longest == 16384


# In a study


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("study")
    corpus = {"source": "needle", "filler": "folder", "path": str(folder / "texts"), "split": "test", "depths": [0.5]}
    grid = {"corpus": corpus, "contexts": [320, 480], "budgets": [32], "gammas": [3], "prompts": 2, "new_tokens": 12}
    path = write_study(folder, grid=grid)
    write_corpus(folder / "texts", words=200)
    return path


def checked(config: Config) -> None:
    check_tokens(config, inputs(config), byte_tokenizer())


def test_a_study_of_needles_passes_its_checks(study):
    checked(load_config(study))


def test_a_context_too_small_for_needles_is_refused_before_any_model_is_loaded(study):
    message = error_of(lambda: checked(load_config(study, ["grid.contexts=[64, 480]"])))
    assert message.startswith("grid.contexts: context = 64: the instruction, 1 needles and question of needle@0.5/")


def test_text_that_is_trained_on_hides_no_needles_of_the_grid(study):
    message = error_of(lambda: inputs(load_config(study, ["grid.corpus.split=train"])))
    assert "training documents too (such as text-" in message


def test_needles_are_configured_where_their_names_are_taken(study):
    with pytest.raises(ConfigError, match="in two of its corpora"):
        both = load_config(study).grid.corpus[0].model_dump()
        inputs(load_config(study, [f"grid.corpus={[both, {**both, 'seed': 1, 'name': 'other'}]}"]))


def test_prompts_go_by_the_name_of_their_corpus_and_keep_what_their_source_says(prose):
    near, far = (load_documents(needles(prose, depths=[d], name=n)) for d, n in ((0.9, "near"), (0.1, None)))
    assert {prompt.source for prompt in built(near, 700)} == {"near"}
    assert {prompt.source for prompt in built(far, 700)} == {"needle"}
    plain = CorpusConfig(source="folder", path=str(prose), split="test")
    named_so = plain.model_copy(update={"name": "prose"})
    assert {prompt.source for prompt in built(load_documents(named_so), 700)} == {"prose"}
    assert [d.source for d in load_documents(named_so)] == [d.source for d in load_documents(plain)]
    assert documents_key(load_documents(named_so)) == documents_key(load_documents(plain)), "a name is no other text"


def test_two_corpora_of_one_source_are_told_apart_by_name_or_refused():
    first, second = CorpusConfig(source="needle", depths=[0.9]), CorpusConfig(source="needle", depths=[0.1], name="far")
    assert [corpus.label for corpus in GridConfig(corpus=[first, second]).corpus] == ["needle", "far"]
    with pytest.raises(ValueError, match=r"2 are called `needle`.*give each a `name`"):
        GridConfig(corpus=[first, second.model_copy(update={"name": None})])
    with pytest.raises(ValueError, match="name"):
        CorpusConfig(source="needle", name="no spaces")
