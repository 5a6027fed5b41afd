"""Accept or reject drafted tokens: pure functions of ids, distributions and uniforms.

Legend: G drafted tokens, V vocabulary.
"""

from collections.abc import Callable, Container, Sequence

from torch import Tensor

from bdcore.decoding.sampling import draw


def accept_greedy(drafted: list[int], verified: list[int]) -> tuple[int, int]:
    """(number accepted, the verifier's next token). `verified` has one entry more than `drafted`.

    Drafts are kept up to the first that differs from the verifier's argmax (Leviathan et al. 2023, with one-hot
    distributions).
    """
    accepted = 0
    while accepted < len(drafted) and drafted[accepted] == verified[accepted]:
        accepted += 1
    return accepted, verified[accepted]


def accept_sampled(
    drafted: list[int], p_GV: Tensor, q_GV: Sequence[Tensor], uniforms: Sequence[float]
) -> tuple[int, int]:
    """(number accepted, the verifier's next token), each token distributed as p (Leviathan et al. 2023, algorithm 1).

    Draft i was drawn from `q_GV[i]` and is accepted with probability min(1, p / q); the first rejection is replaced by
    a draw from max(0, p - q). `p_GV` has one row and `uniforms` one number in [0, 1) more than there are drafts.
    """
    for i, token in enumerate(drafted):
        p_V, q_V = p_GV[i], q_GV[i]
        if not uniforms[i] * float(q_V[token]) < float(p_V[token]):  # strict: u = 0 must not accept what p excludes
            residual_V = (p_V - q_V).clamp(min=0)
            # p = q up to rounding leaves nothing: any draw from p is right then.
            return i, draw(residual_V if float(residual_V.sum()) > 0 else p_V, uniforms[-1])
    return len(drafted), draw(p_GV[len(drafted)], uniforms[-1])


def commit(
    drafted: list[int],
    accepted: int,
    own: int,
    *,
    eos: Container[int],
    remaining: int,
    stops: Callable[[list[int]], bool] | None = None,
) -> tuple[list[int], int, str | None]:
    """(tokens to emit, accepted among them, stop reason): EOS or a stop string inside the block ends there, the limit
    is exact. `stops` is told the block up to each token.

    What lies after a stop is neither emitted nor counted.
    """
    tokens = [*drafted[:accepted], own][:remaining]
    for i, token in enumerate(tokens):
        reason = "eos" if token in eos else "stop" if stops is not None and stops(tokens[: i + 1]) else None
        if reason is not None:
            return tokens[: i + 1], min(accepted, i + 1), reason
    return tokens, min(accepted, len(tokens)), "length" if len(tokens) == remaining else None
