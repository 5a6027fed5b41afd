"""How often trained drafters say what the verifier says, at every token of held-out documents, by context and budget.

`replay` measures a draft of one token at some positions, through the pipeline; differences of a few points drown in its
sample. This reads the same documents through the same cache in blocks of `--block` tokens: before each block the cache
is brought to the budget, and at each token of it the drafter's choice is compared with the verifier's greedy token. All
drafters and policies see the same tokens, so differences are paired over documents. It differs from `replay` in two
ways: the tokens of a block are seen beside the budget, and the selection is renewed once a block.

Needs studies whose drafters are trained (`budgetdraft run CONFIG --stage training`); measured views are kept.

    python benchmarks/agreement.py configs/study/main.yaml configs/study/a_only.yaml --reference main --budgets 64 256
    python benchmarks/agreement.py configs/study/native.yaml --policies retrieval sink_recent --reference sink_recent
"""

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from bdcore.collapse.attribution import attribute_loss
from bdcore.collapse.pairing import difference, pooled
from bdcore.documents import Prompt
from bdcore.evaluation.cell import cache_plan
from bdcore.evaluation.texts import documents_of
from bdcore.identity import digest, read_manifest, write_json
from bdcore.kv.budget import FULL
from bdcore.models.drafter import Drafter, load_drafter
from bdcore.models.loading import load_model, load_tokenizer, materialise, quiet
from bdcore.models.stepper import CachePlan, Stepper
from bdcore.study import Study, open_study
from bdcore.targets.generate import forced
from reports.files import csv_of, write_text

TABLES = "encodings/"
"""Codec tables of the standard library: easy for everyone, so reported apart from code."""

Counts = dict[str, tuple[int, int]]
"""Context -> (agreed, tokens)."""


@dataclass(frozen=True)
class View:
    """What a drafter sees of the text before a block."""

    budget: int
    policy: str
    position_mode: str

    @property
    def name(self) -> str:
        budget = "full" if self.budget == FULL else str(self.budget)
        return f"{budget},{self.policy},{self.position_mode}"


FULL_VIEW = View(FULL, "full", "absolute")


@torch.inference_mode()
def choices(drafter: Drafter, plan: CachePlan, ids: list[int]) -> list[int]:
    """The drafter's token after each token of the text, through the cache of decoding."""
    stepper = Stepper(drafter.model, plan.sized(len(ids)))
    said: list[int] = []
    for start in range(0, len(ids), plan.block):
        stepper.fit()
        best = stepper.feed(ids[start : start + plan.block])[0].argmax(-1)
        said += drafter.to_ids(best).tolist()
    return said


def counts(said: list[int], truth: list[int], contexts: Sequence[int]) -> Counts:
    """Agreement in the tokens up to each context and after the one before it."""
    out: Counts = {}
    for low, high in zip([0, *contexts], contexts, strict=False):
        pairs = list(zip(said[low:high], truth[low:high], strict=True))
        out[str(high)] = sum(a == b for a, b in pairs), len(pairs)
    return out


class Measured:
    """What was measured, on disk: a view of a drafter on a document costs seconds to minutes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(self, key: Sequence[Any], make: Any) -> Any:
        path = self.folder / f"{digest(*key)}.json"
        if not path.is_file():
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json(path, make())
        return json.loads(path.read_text())


def documents(study: Study) -> list[Prompt]:
    tokenizer = load_tokenizer(source(study), study.config.verifier.revision)
    return documents_of(study.config.grid, study.inputs.corpora, tokenizer, study.config.seed)


def source(study: Study) -> str:
    return materialise(study.config.verifier, study.workspace.models)


def truths(study: Study, texts: list[Prompt], measured: Measured) -> list[list[int]]:
    """The verifier's greedy token after each token of each document."""
    loaded: list[Any] = []

    def make(text: Prompt) -> list[int]:
        loaded[:] = loaded or [load_model(source(study), dtype=torch.float32, device=study.runtime.device)]
        print(f"verifier on {text.doc_id}", flush=True)
        return forced(loaded[0], text.ids, top_k=1).ids

    return [measured.get(("truth", study.keys.verifier, text.ids), lambda text=text: make(text)) for text in texts]


def drafters(study: Study, names: Iterable[str]) -> Iterator[tuple[str, str, Drafter]]:
    """(name, key, drafter): the trained one under the study's name, the base one as `base`."""
    for name in names:
        key = study.keys.base if name == "base" else study.keys.trained
        folder = study.workspace.drafter(key)
        if read_manifest(folder) is None:
            raise SystemExit(f"{study.config.name}: drafter {key} is not trained; run `budgetdraft run` on it first")
        with quiet():
            vocab = study.inputs.verifier.vocab
            yield (
                name,
                key,
                load_drafter(str(folder), verifier_vocab=vocab, dtype=torch.float32, device=study.runtime.device),
            )


Key = tuple[str, str, str, str]
"""Drafter, group of documents, view, context."""
Table = dict[Key, list[tuple[int, ...]]]
"""Sums per document."""


def measure(
    study: Study, names: list[str], views: list[View], contexts: list[int], block: int, measured: Measured
) -> Table:
    texts = [replace(t, ids=t.ids[: contexts[-1]]) for t in documents(study)]
    right = truths(study, texts, measured)
    table: Table = {}
    for name, key, drafter in drafters(study, names):
        for view in views:
            how = cache_plan(study.config, budget=view.budget, policy=view.policy, position_mode=view.position_mode)
            plan = replace(how, block=block)
            for text, truth in zip(texts, right, strict=True):
                found = measured.get(
                    ("agreement", key, asdict(plan), text.ids, contexts),
                    lambda: counts(choices(drafter, plan, text.ids), truth, contexts),  # noqa: B023
                )
                group = "tables" if TABLES in text.doc_id else text.source
                for context, sums in found.items():
                    table.setdefault((name, group, view.name, context), []).append(tuple(sums))
            print(f"{name} {view.name} measured on {len(texts)} documents", flush=True)
    return table


def rows(tables: Sequence[Table], reference: str | None) -> list[dict[str, Any]]:
    """Agreement with its interval over documents, and paired differences to the reference; where that is a policy, also
    as shares of what it loses against the full cache.

    One table per seed: a document counts with the sum over its seeds, and each seed's difference stands beside.
    """
    table = over_seeds(tables)
    out: list[dict[str, Any]] = []
    for (name, group, view, context), sums in sorted(table.items()):
        one = pooled(sums)
        budget, policy, mode = view.split(",")
        row = {"drafter": name, "corpus": group, "context": int(context), "budget": budget, "policy": policy}
        row |= {"position_mode": mode, "n": len(sums), "tokens": sum(b for _, b in sums)}
        row |= {"agreement": one.value, "lo": one.low, "hi": one.high}
        others = [o for o in sorted(table) if o[1::2] == (group, context) and compared(name, view, o, reference)]
        gaps = [beside(tables, table, (name, group, view, context), other) for other in others]
        out += [row | gap for gap in gaps or [dict.fromkeys(("reference", "minus_reference", "minus_lo", "minus_hi"))]]
    return out


def beside(tables: Sequence[Table], table: Table, key: Key, other: Key) -> dict[str, Any]:
    """The columns that compare an entry with another of the same documents."""
    (name, group, view, context), sums = key, table[key]
    gap = difference(sums, table[other])
    row: dict[str, Any] = {"reference": f"{other[0]} {other[2]}"}
    row |= {"minus_reference": gap.value, "minus_lo": gap.low, "minus_hi": gap.high}
    full = table.get((name, group, FULL_VIEW.name, context))
    if full and other[2] != view != FULL_VIEW.name:
        share = attribute_loss(full, table[other], {view: sums}).swaps[0].share
        row |= {"share_of_gap": share.value, "share_lo": share.low, "share_hi": share.high}
    if len(tables) > 1:
        each = [difference(t[key], t[other]).value for t in tables]
        row["minus_by_seed"] = " ".join(f"{value:.4f}" for value in each if value is not None)
    return row


def compared(name: str, view: str, other: Key, reference: str | None) -> bool:
    """Whether `other` is what this drafter and view are compared with: the reference drafter in the same view, or the
    same drafter under the reference policy, at the same budget or, for the full cache, at each.
    """
    budget, policy, mode = view.split(",")
    its_budget, its_policy, its_mode = other[2].split(",")
    if other[0] == reference:
        return name != reference and other[2] == view
    same = budget == "full" or (budget, mode) == (its_budget, its_mode)
    return other[0] == name and its_policy == reference != policy and same


def over_seeds(tables: Sequence[Table]) -> Table:
    """Sums per document over tables with the same entries."""
    return {
        key: [tuple(map(sum, zip(*sums, strict=True))) for sums in zip(*(table[key] for table in tables), strict=True)]
        for key in tables[0]
    }


def one(configs: Sequence[str], settings: list[str], views: list[View], contexts: list[int], block: int) -> Table:
    """The table of all studies with these settings."""
    studies = [open_study(config, settings) for config in configs if config != "base"]
    names = [[s.config.name] for s in studies]
    names[0] += ["base"] if "base" in configs else []
    measured = Measured(studies[0].workspace.root / "agreement")
    table: Table = {}
    for study, wanted in zip(studies, names, strict=True):
        table |= measure(study, wanted, views, contexts, block, measured)
    return table


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("configs", nargs="+", help="studies whose drafters are trained; `base` adds the first's base")
    parser.add_argument("--set", action="append", default=[], help="section.field=value for all, as in `budgetdraft`")
    parser.add_argument("--seeds", type=int, nargs="+", help="drafters trained with each training.seed, pooled")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--budgets", nargs="+", default=["64", "256", "full"])
    parser.add_argument("--policies", nargs="+", default=["attention_mass"])
    parser.add_argument("--modes", nargs="+", default=["absolute"], choices=["absolute", "in_cache"])
    parser.add_argument("--reference", help="name of the study, or the policy, that the others are compared with")
    parser.add_argument("--block", type=int, default=32, help="tokens read at once, between two selections")
    parser.add_argument("--out", type=Path, default=Path("workspace/benchmarks/agreement.csv"))
    options = parser.parse_args(argv)
    sparse = [int(budget) for budget in options.budgets if budget != "full"]
    views = [View(b, p, m) for b, p, m in product(sparse, options.policies, options.modes)]
    views += [FULL_VIEW] if "full" in options.budgets else []
    seeds = [[f"training.seed={seed}"] for seed in options.seeds or ()] or [[]]
    tables = [one(options.configs, [*options.set, *seed], views, options.contexts, options.block) for seed in seeds]
    found = rows(tables, options.reference)
    write_text(options.out, csv_of(found))
    return found


if __name__ == "__main__":
    main()
