"""Documents too short for a grid: counted once, logged, and kept beside the rows."""

import logging
import random
from types import SimpleNamespace

import pytest

from bdcore.config import CorpusConfig, GridConfig
from bdcore.documents import Document
from bdcore.workspace import Workspace
from tasks import texts
from tasks.texts import count_short, text_facts
from tests.tiny import byte_tokenizer

SEED = 1


def documents(source: str, long: int, short: int) -> list[Document]:
    """A byte is a token: 90 are enough, 20 are not."""
    sizes = [90] * long + [20] * short
    return [Document(f"{source}-{i}", source, "a" * size) for i, size in enumerate(sizes)]


@pytest.fixture
def study(tmp_path, monkeypatch):
    monkeypatch.setattr(texts, "get_run_logger", lambda: logging.getLogger("grid"))
    corpora = [CorpusConfig(source="pg19", split="test"), CorpusConfig(source="stdlib", split="test")]
    return SimpleNamespace(
        workspace=Workspace(tmp_path),
        keys=SimpleNamespace(run="run"),
        config=SimpleNamespace(grid=GridConfig(corpus=corpora, contexts=[40, 80], prompts=3, budgets=[32])),
        inputs=SimpleNamespace(corpora=[documents("pg19", 3, 5), documents("stdlib", 6, 0)]),
    )


def test_those_passed_over_are_counted_by_corpus_logged_and_kept(study, caplog):
    assert text_facts(study) == {}
    with caplog.at_level(logging.INFO, logger="grid"):
        count_short(study, byte_tokenizer(), SEED)
    order = random.Random(SEED).sample(study.inputs.corpora[0], 8)  # as `build_prompts` takes them
    last = max(i for i, document in enumerate(order) if len(document.text) == 90)
    short = last + 1 - 3
    assert short > 0
    assert text_facts(study) == {"tokens": 80, "too_short": {"pg19": short, "stdlib": 0}}
    [line] = caplog.messages
    assert line == f"grid: documents passed over, too short for 80 tokens: {short} of pg19, 0 of stdlib"


def test_they_are_counted_once_per_run_and_again_where_the_file_is_damaged(study, caplog):
    path = study.workspace.samples("run") / "texts.json"
    count_short(study, byte_tokenizer(), SEED)
    whole = path.read_text()
    with caplog.at_level(logging.INFO, logger="grid"):
        count_short(study, None, SEED)
    assert not caplog.messages
    path.write_text("{")
    count_short(study, byte_tokenizer(), SEED)
    assert path.read_text() == whole
