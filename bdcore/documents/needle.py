"""Needles: secret numbers hidden at chosen depths of long text, one of which is asked for at its end.

Retrieval on demand: how far back the answer lies is known in tokens, at every context length. As in RULER's multi-key
task the other numbers of a text distract (Hsieh et al. 2024).
"""

import random
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import cycle
from typing import TYPE_CHECKING

from bdcore.config import CorpusConfig
from bdcore.documents.document import Document, Needle, hashed_split, needle_id
from bdcore.documents.encoding import encode, encode_prefix
from bdcore.identity import digest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FIRST = "amber brave calm distant eager faint gentle hollow idle jolly keen lonely mellow narrow odd pale quiet rapid"
_SECOND = "anchor badger candle dragon engine falcon garden harbor island jacket kettle lantern mirror needle orchard"
NAMES = [f"{first} {second}" for first in _FIRST.split() for second in _SECOND.split()]
_BREAK = re.compile(r"\n|(?<=[.!?]) ")  # a needle goes before the blank or newline that ends a sentence or line


def hidden(fillers: Iterable[Document], corpus: CorpusConfig) -> list[Document]:
    """A needle document of each filler; they ask for each of `corpus.depths` in turn.

    Names and numbers follow from `corpus.seed` and the filler's name. Those of the two splits have none in common.
    """
    return [_document(filler, corpus, depth) for filler, depth in zip(fillers, cycle(corpus.depths), strict=False)]


def _document(filler: Document, corpus: CorpusConfig, asked: float) -> Document:
    rng = random.Random(digest("needle", corpus.seed, filler.doc_id))
    names = rng.sample([name for name in NAMES if hashed_split(name) == corpus.split], len(corpus.depths))
    leads = (f"The secret number of the {name} is" for name in names)
    needles = tuple(
        Needle(depth, lead, number, depth == asked)
        for depth, lead, number in zip(corpus.depths, leads, _numbers(rng, corpus.split), strict=False)
    )
    question = f"What is the secret number of the {names[corpus.depths.index(asked)]}?"
    name = needle_id(asked, filler.doc_id)
    return Document(name, "needle", filler.text, question, needles, filler.origin, corpus.chat, corpus=corpus.name)


def _numbers(rng: random.Random, split: str) -> Iterator[str]:
    while True:
        number = str(rng.randrange(100_000, 1_000_000))
        if hashed_split(number) == split:
            yield number


def needle_tokens(document: Document, tokenizer: "PreTrainedTokenizerBase") -> int:
    """The most tokens that the needles of a document take in its text."""
    return sum(len(encode(tokenizer, f"\n{needle.sentence}\n", after=True)) for needle in document.needles)


def planted(
    document: Document, tokenizer: "PreTrainedTokenizerBase", length: int, *, most: int
) -> tuple[list[int], int]:
    """(ids, evidence): the text with its needles, at most `most` ids, and the index at which the evidence begins.

    Depths are of the text's part of the first `length` ids; each needle stands at the last end of a line or sentence
    before its own. Fewer than `length` ids if the text is too short.
    """
    text, space = document.text, length - needle_tokens(document, tokenizer)
    breaks = [0, *(found.start() for found in _BREAK.finditer(text)), len(text)]
    ids, start, read, evidence = list[int](), 0, 0, 0
    for needle in sorted(document.needles, key=lambda needle: needle.depth):
        end = _last_break(tokenizer, text, start, breaks, int(needle.depth * space) - read)
        piece = encode(tokenizer, text[start:end], after=True)
        ids, start, read = ids + piece, end, read + len(piece)
        if needle.asked:
            evidence = len(ids)
        ids += encode(tokenizer, _set_off(needle, text, end), after=True)
    return ids + encode_prefix(tokenizer, text[start:], most - len(ids), after=True), evidence


def _last_break(tokenizer: "PreTrainedTokenizerBase", text: str, start: int, breaks: Sequence[int], tokens: int) -> int:
    """The last break from `start` on with no more than `tokens` of text before it."""

    def size(end: int) -> int:
        return len(encode_prefix(tokenizer, text[start:end], tokens + 1, after=True))

    ahead = breaks[bisect_right(breaks, start) - 1 :]
    return ahead[max(0, bisect_right(ahead, tokens, key=size) - 1)]


def _set_off(needle: Needle, text: str, at: int) -> str:
    """The sentence with what keeps it apart from the text that goes on at `at`."""
    if at == 0:
        return needle.sentence + "\n"
    return ("\n" if at == len(text) or text[at] == "\n" else " ") + needle.sentence
