"""Which cached keys stay: named policies behind one pure function.

Legend: B batch, Q query heads, H KV heads, G = Q / H query heads per KV head, T cached keys, W queries of the
observation window, N chunks, K kept keys, D head dim.

The cache is cut into chunks of `chunk` neighbouring keys. Sinks, recent keys and the (possibly partial) last chunk are
always kept; the rest of the budget goes to the chunks with the highest score of the policy. Every KV head keeps its own
set: the scores of its G query heads are averaged, so a group never splits.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from bdcore.kv.budget import Selection

ScoreFn = Callable[[Tensor, Tensor, float, torch.Generator], Tensor]


def window_mass(queries_BQWD: Tensor, keys_BHTD: Tensor, scale: float) -> Tensor:
    """Softmaxed attention of the newest W queries on every cached key, averaged over group and window: (B, H, T).

    The queries belong to the last W keys, so each sees only the keys up to its own. Never forms more than W x T weights
    per head. Computed in fp32: bf16 loses the tail.
    """
    B, Q, W, D = queries_BQWD.shape
    H, T = keys_BHTD.shape[1], keys_BHTD.shape[2]
    q_BHRD = queries_BQWD.float().reshape(B, H, Q // H * W, D)  # R = G * W rows share one read of the keys
    logits_BHGWT = (q_BHRD @ keys_BHTD.float().transpose(2, 3) * scale).view(B, H, Q // H, W, T)
    own_W1 = torch.arange(T - W, T, device=keys_BHTD.device)[:, None]
    hidden_WT = torch.arange(T, device=keys_BHTD.device)[None] > own_W1
    return logits_BHGWT.masked_fill(hidden_WT, float("-inf")).softmax(-1).mean((2, 3))


def _attention_mass(queries_BQWD: Tensor, keys_BHTD: Tensor, scale: float, _: torch.Generator) -> Tensor:
    return window_mass(queries_BQWD, keys_BHTD, scale)


def _last_key(_: Tensor, keys_BHTD: Tensor, scale: float, __: torch.Generator) -> Tensor:
    # The authors' code: the newest cached key stands in for the query, and no softmax is taken.
    return (keys_BHTD.float() @ keys_BHTD[:, :, -1:].float().transpose(2, 3)).squeeze(-1) * scale


def _sink_recent(_: Tensor, keys_BHTD: Tensor, scale: float, __: torch.Generator) -> Tensor:
    # StreamingLLM: the newer, the better.
    B, H, T, _D = keys_BHTD.shape
    return torch.arange(T, device=keys_BHTD.device, dtype=torch.float32).expand(B, H, T)


def _random(_: Tensor, keys_BHTD: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    # Drawn on the CPU, so that every device keeps the same chunks.
    return torch.rand(keys_BHTD.shape[:3], generator=generator).to(keys_BHTD.device)


POLICIES: dict[str, ScoreFn] = {
    "attention_mass": _attention_mass,
    "last_key": _last_key,
    "sink_recent": _sink_recent,
    "random": _random,
}
NEEDS_QUERIES = frozenset({"attention_mass"})
# `last_key` compares with the mean key of a chunk; the others add up what the chunk's keys hold.
_CHUNK_MEAN = frozenset({"last_key"})


def chunk_scores(scores_BHT: Tensor, chunk: int, *, mean: bool) -> Tensor:
    """Key scores summed (or averaged) over each chunk, the last one possibly partial: (B, H, N)."""
    T = scores_BHT.shape[2]
    owner_T = torch.arange(T, device=scores_BHT.device) // chunk
    out_BHN = scores_BHT.new_zeros(*scores_BHT.shape[:2], -(-T // chunk)).index_add_(2, owner_T, scores_BHT)
    return out_BHN / torch.bincount(owner_T) if mean else out_BHN


def select(queries_BQWD: Tensor, keys_BHTD: Tensor, *, budget: int, selection: Selection, scale: float) -> Tensor:
    """Indices of the keys that stay, ascending: (B, H, K) with K <= budget; all T of them when T <= budget.

    Ties go to the lower index. Raises ValueError when the forced chunks alone exceed the budget.
    """
    B, H, T, _ = keys_BHTD.shape
    if budget >= T:
        return torch.arange(T, device=keys_BHTD.device).expand(B, H, T)
    chunk, num_chunks = selection.chunk, -(-T // selection.chunk)
    partial = T - (num_chunks - 1) * chunk
    keep = (budget - partial) // chunk + 1
    forced_N = _forced(T, num_chunks, selection).to(keys_BHTD.device)
    if int(forced_N.sum()) > keep:
        raise ValueError(
            f"budget = {budget} holds {keep} chunks of {chunk}, sinks and recent keys need {int(forced_N.sum())}"
        )
    generator = torch.Generator().manual_seed(selection.seed + T)
    scores_BHT = POLICIES[selection.policy](queries_BQWD, keys_BHTD, scale, generator)
    scores_BHN = chunk_scores(scores_BHT, chunk, mean=selection.policy in _CHUNK_MEAN)
    scores_BHN = scores_BHN.masked_fill(forced_N, float("inf"))
    best_BHN = scores_BHN.argsort(dim=-1, descending=True, stable=True)[..., :keep].sort(-1).values
    kept_BHK = (best_BHN[..., None] * chunk + torch.arange(chunk, device=keys_BHTD.device)).flatten(2)
    # The last chunk is forced and sorts last: only its missing tail lies beyond T.
    return kept_BHK[..., : (keep - 1) * chunk + partial]


def _forced(T: int, num_chunks: int, selection: Selection) -> Tensor:
    index_N = torch.arange(num_chunks)
    first_recent = (T - max(selection.recent, 1)) // selection.chunk
    return (index_N * selection.chunk < selection.sinks) | (index_N >= first_recent)
