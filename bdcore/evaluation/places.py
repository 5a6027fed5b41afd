"""What kind of place in a text a token stands at: its class, and how far back the text shows it."""

from collections.abc import Sequence

ORDER = 2
"""Tokens before a token that make its context in `Evidence`."""


def token_class(text: str) -> str:
    """`newline`, `space`, `number`, `word` (starts one), `part` (goes on with one), `punctuation` or `other`."""
    bare = text.strip()
    if not bare:
        return "newline" if "\n" in text else "space"
    if bare.isdigit():
        return "number"
    if bare.replace("_", "").replace("'", "").isalnum():
        return "word" if text[0].isspace() or bare[0].isupper() else "part"
    return "other" if any(c.isalnum() for c in bare) else "punctuation"


class Evidence:
    """Where in a growing text each token last followed the same two tokens: what an induction head could copy."""

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = ids
        self._last: dict[tuple[int, ...], int] = {}
        self._read = ORDER

    def distance(self, position: int, token: int) -> int | None:
        """Tokens from `position` back to where `token` stood; None where the text so far never shows it.

        Positions are asked for in ascending order.
        """
        for i in range(self._read, position):
            self._last[tuple(self.ids[i - ORDER : i + 1])] = i
        self._read = max(self._read, position)
        found = self._last.get((*self.ids[max(0, position - ORDER) : position], token))
        return None if found is None else position - found
