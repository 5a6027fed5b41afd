"""A document, and what every source of documents shares: names for errors, and a split by name."""

import re
from dataclasses import dataclass
from pathlib import Path

from bdcore.config import Chat, CorpusConfig, FrameName
from bdcore.identity import digest


@dataclass(frozen=True)
class Needle:
    """A fact to hide at `depth` of a text (0 begins it, 1 ends it); the evidence, if it is the one `asked` for."""

    depth: float
    lead: str
    answer: str
    asked: bool

    @property
    def sentence(self) -> str:
        return f"{self.lead} {self.answer}."


@dataclass(frozen=True)
class Document:
    """One text under a name that is the same on every run; `question` is what is to be answered from it.

    `needles` are not in the text yet: where they go depends on the prompt's length. `filler`: the document whose text
    hides them. `chat`: whether the question is put by a chat template. `frame`: whose words surround the text.
    """

    doc_id: str
    source: str
    text: str
    question: str | None = None
    needles: tuple[Needle, ...] = ()
    filler: str | None = None
    chat: Chat = "never"
    frame: FrameName = "benchmark"
    corpus: str | None = None
    """What rows call its corpus; None: its source."""

    @property
    def origin(self) -> str:
        """Name of the document that the text is of."""
        return self.filler or self.doc_id

    @property
    def evidence(self) -> Needle | None:
        """The needle that answers the question."""
        return next((needle for needle in self.needles if needle.asked), None)


def needle_id(depth: float, filler_id: str) -> str:
    """Name of the document that hides needles in another one's text and asks for the one at `depth`."""
    return f"needle@{depth:g}/{filler_id}"


def origin_of(doc_id: str) -> str:
    """`Document.origin` by the name alone, which is all that a row has."""
    return re.sub(r"^needle@[^/]*/", "", doc_id)


def absolute(path: str) -> Path:
    return Path(path).expanduser().resolve()


def where(corpus: CorpusConfig) -> str:
    if corpus.path is not None:
        return f"corpus.path = {absolute(corpus.path)}"
    return f"corpus.source = {corpus.source}"


def brief(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def hashed_split(doc_id: str) -> str:
    # 1 of 4. With this salt the small sets (QMSum's 35 meetings, 24 NarrativeQA books) divide close to that, too.
    return "test" if int(digest("split 207", doc_id), 16) % 4 == 0 else "train"
