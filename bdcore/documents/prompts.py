"""How a document becomes a prompt of an exact token length, and what is counted when it cannot.

It never joins or pads documents, and adds no special tokens but those that a chat template writes.
"""

import random
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from bdcore.config import ConfigError
from bdcore.documents.chat import user_turn, uses_template
from bdcore.documents.document import Document
from bdcore.documents.encoding import encode, encode_prefix
from bdcore.documents.frames import frame_of
from bdcore.documents.needle import needle_tokens, planted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """`ids` start at token `offset` of the document (or of its question frame); `truncated`: the document goes on.

    `evidence_distance`: how many of the newest ids hold the needle that is asked for and all after it.
    """

    doc_id: str
    source: str
    offset: int
    ids: list[int]
    truncated: bool
    evidence_distance: int | None = None


@dataclass(frozen=True)
class PromptSet:
    """Prompts of one length, and how many documents were passed over because they are shorter."""

    prompts: list[Prompt]
    too_short: int


@dataclass(frozen=True)
class Ends:
    """What a prompt holds whole: ids before and after a text that starts with `opening` and is cut at its end."""

    head: list[int]
    opening: str
    tail: list[int]

    @property
    def tokens(self) -> int:
        return len(self.head) + len(self.tail)


def build_prompts(
    documents: Sequence[Document], tokenizer: "PreTrainedTokenizerBase", *, length: int, count: int, seed: int
) -> PromptSet:
    """The first `count` documents, in an order drawn by `seed`, that fill `length` tokens; the end of each is cut.

    A document with a question becomes instruction + cut document + question, `length` tokens in all; with `chat` they
    are the user's turn of the tokenizer's template. Needles stand at their depths, and are not cut either; as far as
    there are documents, each depth is asked for as often.
    """
    prompts: list[Prompt] = []
    short: list[Document] = []
    made: Counter[float] = Counter()
    for document in _drawn(documents, seed, made):
        if len(prompts) == count:
            break
        prompt = _prompt(document, tokenizer, length)
        if prompt is None:
            short.append(document)
            continue
        prompts.append(prompt)
        if document.evidence:
            made[document.evidence.depth] += 1
    if len(prompts) < count:
        longest = f" (the longest of these has {_longest(short, tokenizer)} tokens)" if short else ""
        raise ConfigError(
            f"{count} prompts of {length} tokens: only {len(prompts)} of {len(documents)} documents will do, "
            f"{len(short)} are too short{longest}; use a smaller context, fewer prompts or another corpus"
        )
    return PromptSet(prompts, len(short))


def _drawn(documents: Sequence[Document], seed: int, made: Mapping[float, int]) -> Iterator[Document]:
    """An order drawn by `seed`. Where it has a needle, one of the depth that has `made` fewest prompts so far comes."""
    order = random.Random(seed).sample(documents, len(documents))
    waiting: dict[float, deque[Document]] = {}
    for document in order:
        if document.evidence:
            waiting.setdefault(document.evidence.depth, deque()).append(document)
    for document in order:
        if document.evidence:
            yield waiting[min((d for d in waiting if waiting[d]), key=lambda d: made[d])].popleft()
        else:
            yield document


def _prompt(document: Document, tokenizer: "PreTrainedTokenizerBase", length: int) -> Prompt | None:
    ends = _ends(document, tokenizer)
    room = length - ends.tokens
    if document.question is not None:
        _check_room(document, tokenizer, ends, length)
    if _most_tokens(document, ends) < room:
        return None
    distance = None
    if document.needles:
        opening = encode(tokenizer, ends.opening, after=bool(ends.head))
        left = room - len(opening)
        text, start = planted(document, tokenizer, left, most=left + 1)
        ids, distance = opening + text, left - start + len(ends.tail)
    else:  # one more tells whether anything is cut
        ids = encode_prefix(tokenizer, ends.opening + document.text, room + 1, after=bool(ends.head))
    if len(ids) < room:
        return None
    whole = ends.head + ids[:room] + ends.tail
    return Prompt(document.doc_id, document.corpus or document.source, 0, whole, len(ids) > room, distance)


def _ends(document: Document, tokenizer: "PreTrainedTokenizerBase") -> Ends:
    frame = frame_of(document)
    if document.question is None:
        return Ends([], "", [])
    if not uses_template(tokenizer, document.chat):
        lead = frame.lead and " " + frame.lead
        return Ends([], frame.opening, encode(tokenizer, frame.closing + lead, after=True))
    before, after = user_turn(tokenizer, frame.lead)
    head = before.rstrip(" ")  # a blank before a word is that word's, as tokenizers have it
    return Ends(
        encode(tokenizer, head, control=True),
        before[len(head) :] + frame.opening,
        encode(tokenizer, frame.closing, after=True) + encode(tokenizer, after, after=True, control=True),
    )


def _check_room(document: Document, tokenizer: "PreTrainedTokenizerBase", ends: Ends, length: int) -> None:
    needles = needle_tokens(document, tokenizer)
    alone = ends.tokens + len(encode(tokenizer, ends.opening, after=bool(ends.head))) + needles
    if length <= alone:
        count = len(document.needles)
        parts = f"instruction, {count} needles and question" if needles else "instruction and question"
        remedy = "a larger context or fewer depths" if needles else "a larger context"
        raise ConfigError(
            f"context = {length}: the {parts} of {document.doc_id} alone take {alone} tokens; use {remedy}"
        )


def _most_tokens(document: Document, ends: Ends) -> int:
    # A token stands for at least one byte; SentencePiece may put one blank before the text.
    needles = "".join(f"\n{needle.sentence}" for needle in document.needles)
    return len((ends.opening + document.text + needles).encode()) + 1


def _longest(documents: list[Document], tokenizer: "PreTrainedTokenizerBase") -> int:
    """Tokens of the longest prompt these documents can fill; documents that cannot be longer are not tokenised."""
    longest = 0
    sized = [(document, _ends(document, tokenizer)) for document in documents]
    for document, ends in sorted(sized, key=lambda pair: -_most_tokens(*pair) - pair[1].tokens):
        if _most_tokens(document, ends) + ends.tokens <= longest:
            break
        text = len(encode(tokenizer, ends.opening + document.text, after=bool(ends.head)))
        longest = max(longest, ends.tokens + text + needle_tokens(document, tokenizer))
    return longest
