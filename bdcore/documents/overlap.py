"""Which documents of two sets are one and the same: by name, or by their text under other names."""

import hashlib
from collections.abc import Iterable

from bdcore.documents.document import Document

_LEAST, _MOST = 256, 16_384
"""Characters of a text that are compared: shorter ones, such as empty modules, are alike by chance."""


def shared(ours: Iterable[Document], theirs: Iterable[Document]) -> list[str]:
    """Every document of `theirs` that is one of `ours`, as "name" or "our name as their name", in their order.

    A needle document is the one whose text hides it. Texts are compared by their first 16K characters, whatever stands
    between their words.
    """
    by_origin: dict[str, Document] = {}
    by_text: dict[bytes, Document] = {}
    for document in ours:
        by_origin.setdefault(document.origin, document)
        if text := _compared(document):
            by_text.setdefault(text, document)
    found: list[str] = []
    for document in theirs:
        one = by_origin.get(document.origin) or by_text.get(_compared(document))
        if one:
            names = dict.fromkeys((one.doc_id, document.doc_id))
            found.append(" as ".join(names))
    return found


def _compared(document: Document) -> bytes:
    """What a text is known by; empty where it is too short to tell."""
    text = " ".join(document.text[:_MOST].split())
    return hashlib.blake2b(text.encode(), digest_size=16).digest() if len(text) >= _LEAST else b""
