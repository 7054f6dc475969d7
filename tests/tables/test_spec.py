"""What a table file may say, and how mistakes in it are told."""

import pytest

from fedplat.errors import UserError
from fedplat.registry import entries
from fedplat.tables.cells import Options, plan
from fedplat.tables.spec import parse_table, read_table, table_names

from . import TINY, tiny

RULES = {"baselines", "robust", "similarity", "filtering", "subset_rules", "mud_hog", "fed_credit"}
"""The modules of aggregation rules; other strategies are not there to withstand anybody."""


def test_plain_values_and_tables_of_values_are_the_same_thing() -> None:
    rows = tiny().rows
    assert [value.name for value in rows.values] == ["mean", "median", "krum"]
    assert [value.shown for value in rows.values] == ["mean", "Me_dian", "krum"]
    assert [value.name for value in tiny().blocks[0].values] == ["0.5"]


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("scenario =", "scenaro =", "did you mean 'scenario'?"),
        ('"drop"', '"dorp"', "unknown metric 'dorp': did you mean 'drop'?"),
        ('key = "strategy"', 'kye = "strategy"', "rows.kye: unknown key; did you mean 'key'?"),
        ('attack = "none"', 'attack = "nnoe"', "unknown attack 'nnoe': did you mean 'none'?"),
        ('method = ["krum"], ', 'methd = ["krum"], ', "unknown axis 'methd': did you mean 'method'?"),
        ("value = 90.5", 'value = "much"', "'value' has to be there, and a number"),
        ('"strategy.krum.f"', '"strategy.kurm.f"', "did you mean 'krum'?"),
        ('"mean", {', '"mean", "mean", {', "names mean twice"),
        ('name = "share"', 'name = "attack"', "axes need names of their own"),
        ('[reference]\nattack = "none"', "", r"'drop' needs \[reference\]"),
        ("rounds = 2", "rounds = 0", "rounds: found 0"),
    ],
)
def test_a_mistake_is_told_with_what_would_be_right(before: str, after: str, told: str) -> None:
    assert before in TINY
    with pytest.raises(UserError, match=told):
        parse_table(TINY.replace(before, after).encode(), "tiny")


def test_a_table_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(UserError, match="did you mean 'defences'"):
        read_table("defence")
    with pytest.raises(UserError, match="there is no such file"):
        read_table("mine.toml")
    with pytest.raises(UserError, match="not a TOML file"):
        parse_table(b"title =", "mine.toml")


def test_defences_has_every_rule_and_every_attack() -> None:
    _, table = read_table("defences")
    defences = {value.name for value in table.rows.values}
    rules = {n for n, e in entries("strategies").items() if e.target.split(":")[0].split(".")[-1] in RULES}
    assert len(rules) > 20
    assert rules <= defences
    assert {value.name for value in table.columns.values} - {"none"} == set(entries("attacks"))


@pytest.mark.parametrize("name", table_names())
def test_every_table_that_comes_along_has_cells_whose_configurations_are_right(name: str) -> None:
    stem, table = read_table(name)
    whole = {axis.name: [value.name for value in axis.values] for axis in table.axes}
    # Every value of every axis once, not all combinations of them, which may be thousands.
    seen = set()
    for i in range(max(map(len, whole.values()))):
        for shift in range(len(table.columns.values)):  # past a cell that is skipped
            turned = {axis: i + shift * (axis == table.columns.name) for axis in whole}
            keep = {axis: [names[turned[axis] % len(names)]] for axis, names in whole.items()}
            if cells := plan(stem, table, Options(keep=keep, seeds=1)).cells:
                break
        seen |= {name for cell in cells for name in cell.position}
    assert seen == {name for names in whole.values() for name in names}


@pytest.mark.parametrize("name", table_names())
def test_quick_tables_are_smaller(name: str) -> None:
    stem, table = read_table(name)
    assert table.quick is not None
    kept = {axis.name: [axis.values[0].name] for axis in (table.rows,)}
    quick = plan(stem, table, Options(quick=True, keep=kept))
    assert quick.caps
    assert all(cell.config.rounds <= (table.rounds or 50) for cell in quick.cells)
