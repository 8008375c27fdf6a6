"""Rows that are added to a page leave the others as they are."""

from __future__ import annotations

from tests.parity.page import TABLES, added, page

OLD = page(
    {
        "float64": [("DP2", {"metrics": 1e-9, "gradients": 2e-9}), ("a|b", {"metrics": 3e-9})],
        "paths": [("one", {"metrics": 0.0})],
    }
)


def test_rows_of_a_known_table_are_replaced_or_follow() -> None:
    new = added(OLD, {"float64": [("DP2", {"metrics": 5e-9}), ("CP2", {"loss": 7e-9})]})
    expected = page(
        {
            "float64": [
                ("DP2", {"metrics": 5e-9}),
                ("a|b", {"metrics": 3e-9}),
                ("CP2", {"loss": 7e-9}),
            ],
            "paths": [("one", {"metrics": 0.0})],
        }
    )
    assert new == expected


def test_a_new_table_stands_where_a_whole_run_would_put_it() -> None:
    new = added(OLD, {"own loop": [("DP2", {"metrics": 1e-9})]})
    places = [new.index(TABLES[name]) for name in ("float64", "own loop", "paths")]
    assert places == sorted(places) and "| DP2 | 1e-09 |\n" in new
    assert added(new, {}) == new
