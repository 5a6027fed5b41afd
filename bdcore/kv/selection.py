"""Which cached keys stay: named policies behind one pure function.

Legend: B batch, Q query heads, H KV heads, G = Q / H query heads per KV head, T cached keys, W queries of the
observation window, N chunks, K kept keys, D head dim.

The cache is cut into chunks of `chunk` neighbouring keys. Sinks, recent keys and the (possibly partial) last chunk are
always kept; the rest of the budget goes to the chunks with the highest score of the policy. Every KV head keeps its own
set: the scores of its G query heads are averaged, so a group never splits.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from bdcore.kv.attention import soft_capped
from bdcore.kv.budget import FULL, FULL_POLICY, OBSERVES, READS_AHEAD, Selection


@dataclass(frozen=True)
class Evidence:
    """What a policy may look at to score the cached keys of one layer."""

    queries_BQWD: Tensor
    """The newest queries; they belong to the newest W keys."""
    keys_BHTD: Tensor
    scale: float
    """Of the layer's attention logits."""
    softcap: float | None = None
    positions_HT: Tensor | None = None
    """Where the keys stand, for layers with a sliding window; None: at 0..T-1."""
    window: int | None = None
    """The layer's sliding window: keys at this distance or more get no attention."""
    oracle_HT: Tensor | None = None
    """The verifier's attention on each key's token, for the policy `oracle`."""
    seed: int = 0


ScoreFn = Callable[[Evidence], Tensor]


def window_mass(seen: Evidence) -> Tensor:
    """Softmaxed attention of the newest W queries on every cached key, averaged over group and window: (B, H, T).

    Each query sees only the keys up to its own. Never forms more than W x T weights per head. Computed in fp32: bf16
    loses the tail.
    """
    keys_BHTD = seen.keys_BHTD
    B, Q, W, D = seen.queries_BQWD.shape
    H, T = keys_BHTD.shape[1], keys_BHTD.shape[2]
    q_BHRD = seen.queries_BQWD.float().reshape(B, H, Q // H * W, D)  # R = G * W rows share one read of the keys
    logits_BHRT = soft_capped(q_BHRD @ keys_BHTD.float().transpose(2, 3) * seen.scale, seen.softcap)
    weights_BHGWT = logits_BHRT.view(B, H, Q // H, W, T).masked_fill(_out_of_sight(seen), float("-inf")).softmax(-1)
    return weights_BHGWT.mean((2, 3))


def _out_of_sight(seen: Evidence) -> Tensor:
    """Keys that a query of the window does not attend to: (H or 1, 1, W, T)."""
    T, W = seen.keys_BHTD.shape[2], seen.queries_BQWD.shape[2]
    places_HT = torch.arange(T, device=seen.keys_BHTD.device)[None]
    hidden_HWT = places_HT[:, None] > places_HT[:, -W:, None]
    if seen.window is not None:
        where_HT = places_HT if seen.positions_HT is None else seen.positions_HT
        hidden_HWT = hidden_HWT | (where_HT[:, -W:, None] - where_HT[:, None] >= seen.window)
    return hidden_HWT[:, None]


def _last_key(seen: Evidence) -> Tensor:
    # The authors' code: the newest cached key stands in for the query, and no softmax is taken.
    keys = seen.keys_BHTD.float()
    return (keys @ keys[:, :, -1:].transpose(2, 3)).squeeze(-1) * seen.scale


def _sink_recent(seen: Evidence) -> Tensor:
    # StreamingLLM: the newer, the better.
    B, H, T, _ = seen.keys_BHTD.shape
    return torch.arange(T, device=seen.keys_BHTD.device, dtype=torch.float32).expand(B, H, T)


def _random(seen: Evidence) -> Tensor:
    # Drawn on the CPU, so that every device keeps the same chunks.
    generator = torch.Generator().manual_seed(seen.seed)
    return torch.rand(seen.keys_BHTD.shape[:3], generator=generator).to(seen.keys_BHTD.device)


def _oracle(seen: Evidence) -> Tensor:
    if seen.oracle_HT is None:
        raise ValueError("policy = oracle needs the verifier's attention; only decoding beside a verifier has it")
    return seen.oracle_HT[None].expand(seen.keys_BHTD.shape[:3])


POLICIES: dict[str, ScoreFn] = {
    **dict.fromkeys(sorted(OBSERVES), window_mass),
    "last_key": _last_key,
    "sink_recent": _sink_recent,
    "random": _random,
    "oracle": _oracle,
}
"""`no_sinks` and `no_recent` are controls: `attention_mass` that must not keep what it would keep by rule."""
# `last_key` compares with the mean key of a chunk; the others add up what the chunk's keys hold.
_CHUNK_MEAN = frozenset({"last_key"})


def chunk_scores(scores_BHT: Tensor, chunk: int, *, mean: bool) -> Tensor:
    """Key scores summed (or averaged) over each chunk, the last one possibly partial: (B, H, N)."""
    T = scores_BHT.shape[2]
    N = -(-T // chunk)
    # Not index_add: its sums depend on the order of threads on a GPU, and near-ties would fall differently.
    out_BHN = F.pad(scores_BHT, (0, N * chunk - T)).unflatten(2, (N, chunk)).sum(-1)
    return out_BHN / (T - torch.arange(N, device=scores_BHT.device) * chunk).clamp(max=chunk) if mean else out_BHN


def select(seen: Evidence, *, budget: int, selection: Selection) -> Tensor:
    """Indices of the keys that stay, ascending: (B, H, K) with K <= budget; all T of them when T <= budget, or the
    budget or the policy is full.

    Ties go to the lower index. Raises ValueError when the forced chunks alone exceed the budget.
    """
    B, H, T, _ = seen.keys_BHTD.shape
    device = seen.keys_BHTD.device
    if selection.policy == FULL_POLICY or budget == FULL or budget >= T:
        return torch.arange(T, device=device).expand(B, H, T)
    chunk, num_chunks = selection.chunk, -(-T // selection.chunk)
    partial = T - (num_chunks - 1) * chunk
    keep = (budget - partial) // chunk + 1
    forced_N = _forced(T, num_chunks, selection)
    if int(forced_N.sum()) > keep:
        raise ValueError(
            f"budget = {budget} holds {keep} chunks of {chunk}, sinks and recent keys need {int(forced_N.sum())}"
        )
    scores_BHT = POLICIES[selection.policy](replace(seen, seed=selection.seed + T))
    scores_BHN = chunk_scores(scores_BHT, chunk, mean=selection.policy in _CHUNK_MEAN)
    if selection.policy in READS_AHEAD:
        scores_BHN = torch.maximum(scores_BHN, F.pad(scores_BHN, (1, 0))[..., :-1])
    # Above any score, the infinite ones of keys that an oracle has not seen included.
    scores_BHN = scores_BHN.clamp(max=torch.finfo(scores_BHN.dtype).max).masked_fill(forced_N.to(device), torch.inf)
    scores_BHN = scores_BHN.masked_fill(_banned(T, num_chunks, budget, selection).to(device), -torch.inf)
    best_BHN = scores_BHN.argsort(dim=-1, descending=True, stable=True)[..., :keep].sort(-1).values
    kept_BHK = (best_BHN[..., None] * chunk + torch.arange(chunk, device=device)).flatten(2)
    # The last chunk is forced and sorts last: only its missing tail lies beyond T.
    return kept_BHK[..., : (keep - 1) * chunk + partial]


def _forced(T: int, num_chunks: int, selection: Selection) -> Tensor:
    index_N = torch.arange(num_chunks)
    sinks = 0 if selection.policy == "no_sinks" else selection.sinks
    recent = 1 if selection.policy == "no_recent" else max(selection.recent, 1)
    return (index_N * selection.chunk < sinks) | (index_N >= (T - recent) // selection.chunk)


def _banned(T: int, num_chunks: int, budget: int, selection: Selection) -> Tensor:
    """Chunks that a control leaves out as long as others are left: the sinks, or the newest quarter of the budget.

    The newest chunk stays: it may be partial, and what it holds was just said.
    """
    index_N = torch.arange(num_chunks)
    if selection.policy == "no_sinks":
        return index_N * selection.chunk < selection.sinks
    newest = (index_N >= (T - budget // 4) // selection.chunk) & (index_N < num_chunks - 1)
    return newest if selection.policy == "no_recent" else torch.zeros_like(newest)
