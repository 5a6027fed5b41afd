"""Accept or reject drafted tokens: pure functions of ids.

Greedy speculative decoding keeps the drafts up to the first that differs from the verifier's argmax, then adds the
verifier's own token (Leviathan et al. 2023, with one-hot distributions).
"""

from collections.abc import Container


def accept_greedy(drafted: list[int], verified: list[int]) -> tuple[int, int]:
    """(number accepted, the verifier's next token). `verified` has one entry more than `drafted`."""
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == verified[accepted]:
        accepted += 1
    return accepted, verified[accepted]


def commit(
    drafted: list[int], accepted: int, own: int, *, eos: Container[int], remaining: int
) -> tuple[list[int], int, str | None]:
    """(tokens to emit, accepted among them, stop reason): EOS inside the block stops there, the limit is exact.

    What lies after a stop is neither emitted nor counted.
    """
    tokens = [*drafted[:accepted], own][:remaining]
    for i, token in enumerate(tokens):
        if token in eos:
            return tokens[: i + 1], min(accepted, i + 1), "eos"
    return tokens, min(accepted, len(tokens)), "length" if len(tokens) == remaining else None
