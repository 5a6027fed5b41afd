"""benchmarks/agreement.py: what drafters of several seeds say together."""

import pytest

from benchmarks.agreement import counts, over_seeds, rows

VIEW = "64,attention_mass,in_cache"


def key(name: str) -> tuple[str, str, str, str]:
    return name, "stdlib", VIEW, "512"


def test_agreement_is_counted_between_one_context_and_the_next() -> None:
    found = counts([1, 2, 3, 4, 5, 6], [1, 2, 0, 4, 0, 0], [2, 4, 6])
    assert found == {"2": (2, 2), "4": (1, 2), "6": (0, 2)}


def test_a_document_counts_with_the_sum_over_its_seeds_and_each_seed_stands_beside() -> None:
    first = {key("sparse"): [(6, 10), (9, 20)], key("plain"): [(5, 10), (8, 20)]}
    second = {key("sparse"): [(4, 10), (11, 20)], key("plain"): [(5, 10), (7, 20)]}
    assert over_seeds([first, second]) == {key("sparse"): [(10, 20), (20, 40)], key("plain"): [(10, 20), (15, 40)]}
    plain, sparse = rows([first, second], "plain")
    assert sparse["agreement"] == pytest.approx(30 / 60) and sparse["n"] == 2 and sparse["tokens"] == 60
    assert sparse["minus_reference"] == pytest.approx(5 / 60)
    assert [float(x) for x in sparse["minus_by_seed"].split()] == pytest.approx([2 / 30, 3 / 30], abs=1e-4)
    assert plain["minus_reference"] is None and plain["reference"] is None


def test_one_seed_has_no_column_of_seeds() -> None:
    table = {key("sparse"): [(6, 10), (9, 20)], key("plain"): [(5, 10), (8, 20)]}
    assert all("minus_by_seed" not in row for row in rows([table], "plain"))


def test_policies_are_compared_at_their_budget_and_the_full_cache_at_each() -> None:
    def at(view: str) -> tuple[str, str, str, str]:
        return "one", "stdlib", view, "512"

    table = {
        at("64,retrieval,absolute"): [(6, 10), (9, 20)],
        at("64,sink_recent,absolute"): [(5, 10), (8, 20)],
        at("256,sink_recent,absolute"): [(7, 10), (9, 20)],
        at("full,full,absolute"): [(9, 10), (12, 20)],
    }
    found = {(r["budget"], r["policy"], r["reference"]): r["minus_reference"] for r in rows([table], "sink_recent")}
    assert found == {
        ("64", "retrieval", "one 64,sink_recent,absolute"): pytest.approx(2 / 30),
        ("64", "sink_recent", None): None,
        ("256", "sink_recent", None): None,
        ("full", "full", "one 64,sink_recent,absolute"): pytest.approx(8 / 30),
        ("full", "full", "one 256,sink_recent,absolute"): pytest.approx(5 / 30),
    }


def test_what_a_policy_gives_back_is_a_share_of_what_the_reference_loses() -> None:
    def at(view: str) -> tuple[str, str, str, str]:
        return "one", "stdlib", view, "4096"

    table = {
        at("256,retrieval,absolute"): [(60, 100), (70, 100), (66, 100), (74, 100)],
        at("256,sink_recent,absolute"): [(52, 100), (60, 100), (58, 100), (65, 100)],
        at("full,full,absolute"): [(64, 100), (73, 100), (72, 100), (78, 100)],
    }
    shares = {row["policy"]: row.get("share_of_gap") for row in rows([table], "sink_recent")}
    assert shares == {"retrieval": pytest.approx(35 / 52), "sink_recent": None, "full": None}
