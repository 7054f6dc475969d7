from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedplat.config import load, strategy_names
from fedplat.errors import UserError
from fedplat.scenarios import apply_overrides, read_scenario, scenario_names, variant_names


def raw(**changes: Any) -> dict[str, Any]:
    base = {
        "name": "test",
        "rounds": 3,
        "strategies": ["mean", "trimmed-mean"],
        "data": {"name": "digits"},
        "partition": {"name": "dirichlet", "clients": 10, "alpha": 0.3},
        "model": {"name": "mlp", "hidden": [8, 4]},
        "attacks": [{"name": "sign-flip", "fraction": 0.2}],
        "strategy": {"trimmed-mean": {"beta": 0.1}},
    }
    return base | changes


def error_of(values: dict[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        load(values, "test.toml")
    return str(error.value)


@pytest.mark.parametrize("name", scenario_names())
def test_every_scenario_that_ships_is_valid_in_all_variants_and_says_what_it_is(name: str) -> None:
    for variant in variant_names(name) or [""]:
        config = load(*read_scenario(f"{name}:{variant}" if variant else name))
        assert config.name == f"{name}-{variant}".rstrip("-")
        assert config.description


def test_resolved_configuration_has_every_default_and_reads_back_as_itself() -> None:
    config = load(raw(), "test.toml")
    values = config.to_dict()
    assert values["partition"]["min_samples"] == 10
    assert values["training"]["batch_size"] == 32
    assert values["selection"] == {"name": "all"}
    assert values["strategy"] == {"mean": {"weighted": True}, "trimmed-mean": {"beta": 0.1}}
    again = load(tomllib.loads(tomli_w.dumps(values)), "again")
    assert again.to_dict() == values
    assert again.digest() == config.digest()


def test_settings_reach_the_parts() -> None:
    config = load(raw(), "test.toml")
    assert config.model.settings() == {"hidden": (8, 4)}
    assert config.partition.settings()["alpha"] == 0.3
    assert "clients" not in config.partition.settings()
    assert config.strategy_part("trimmed-mean").settings() == {"beta": 0.1}
    assert config.attacks[0].build().factor == -1.0


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 2},
        {"rounds": 4},
        {"strategies": ["mean"], "strategy": {}},
        {"strategy": {"trimmed-mean": {"beta": 0.11}}},
        {"model": {"name": "mlp", "hidden": [8, 5]}},
        {"attacks": [{"name": "sign-flip", "fraction": 0.2, "factor": -2.0}]},
        {"training": {"lr": 0.11}},
        {"partition": {"name": "dirichlet", "clients": 10, "alpha": 0.31}},
    ],
)
def test_hash_changes_with_anything_that_changes_a_result(changes: dict[str, Any]) -> None:
    assert load(raw(**changes), "t").digest() != load(raw(), "t").digest()


def test_hash_does_not_change_with_where_the_data_lies_or_how_a_file_is_written() -> None:
    digest = load(raw(), "t").digest()
    moved = {"name": "digits", "root": "/somewhere/else", "download": False}
    assert load(raw(data=moved, description="words"), "t").digest() == digest
    assert load(raw(seed=1, selection={"name": "all"}), "t").digest() == digest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"roundss": 3}, ["test.toml: roundss: unknown key", "did you mean 'rounds'?"]),
        ({"rounds": 0}, ["rounds: found 0", "greater than or equal to 1"]),
        ({"rounds": "many"}, ["rounds: found 'many'", "valid integer"]),
        (
            {"model": {"name": "mpl"}},
            ["model.name", "unknown model 'mpl'", "did you mean 'mlp'?", "cnn-fedavg"],
        ),
        ({"model": {"name": "mlp", "hiden": [3]}}, ["model.hiden: unknown key", "did you mean 'hidden'?"]),
        ({"model": {"name": "mlp", "hidden": [0]}}, ["model.hidden.0: found 0"]),
        ({"data": {"name": "mnits"}}, ["did you mean 'mnist'?"]),
        (
            {"partition": {"name": "iid", "clients": 3, "alpha": 1.0}},
            ["partition.alpha: unknown key", "min_samples"],
        ),
        ({"partition": {"name": "dirichlet", "clients": 3, "alpha": -1}}, ["partition.alpha: found -1"]),
        ({"strategies": ["mean", "medain"]}, ["unknown strategy 'medain'", "did you mean 'median'?"]),
        ({"strategies": ["mean", "mean"]}, ["names one twice"]),
        ({"strategies": []}, ["strategies: found []"]),
        (
            {"strategy": {"trimmed-mean": {"betta": 0.1}}},
            ["strategy.trimmed-mean.betta", "did you mean 'beta'?"],
        ),
        (
            {"strategy": {"trimmed-mean": {"beta": 0.5}}},
            ["strategy.trimmed-mean.beta: found 0.5", "less than 0.5"],
        ),
        ({"strategy": {"median": {}}}, ["strategy.median: unknown key", "Allowed: mean, trimmed-mean"]),
        (
            {"attacks": [{"name": "sign-flop", "fraction": 0.1}]},
            ["attacks.0.name", "did you mean 'sign-flip'?"],
        ),
        ({"attacks": [{"name": "sign-flip", "fraction": 2}]}, ["attacks.0.fraction: found 2"]),
        (
            {"attacks": [{"name": "sign-flip", "fraction": 0.1, "of": "gradient"}]},
            ["attacks.0.of", "'delta' or 'weights'"],
        ),
        ({"attacks": [{"name": "sign-flip"}]}, ["attacks.0: give one of 'fraction', 'count' and 'clients'"]),
        ({"attacks": [{"name": "sign-flip", "fraction": 0.1, "clients": [1]}]}, ["give one of"]),
        ({"attacks": [{"fraction": 0.1}]}, ["attacks.0.name: missing"]),
        ({"training": {"optimizer": "adam", "momentum": 0.5}}, ["training", "momentum"]),
        ({"evaluation": {"every": 0}}, ["evaluation.every: found 0"]),
        ({"model": {"name": "nowhere.at.all:thing"}}, ["cannot import nowhere.at.all:thing"]),
        ({"selection": {"name": "fraction", "fraction": 0}}, ["selection.fraction: found 0"]),
    ],
)
def test_a_mistake_is_told_with_file_key_value_and_what_is_allowed(changes: dict, words: list[str]) -> None:
    message = error_of(raw(**changes))
    assert message.startswith("test.toml: ")
    for word in words:
        assert word in message


def test_all_mistakes_are_told_at_once() -> None:
    message = error_of(raw(rounds=-1, sed=3, model={"name": "mlp", "hidden": "x"}))
    assert len(message.splitlines()) == 3


def test_missing_tables_are_named() -> None:
    values = raw()
    del values["model"], values["partition"]
    assert {"test.toml: model: missing", "test.toml: partition: missing"} == set(
        error_of(values).splitlines()
    )


def test_parts_may_be_given_by_import_path() -> None:
    config = load(raw(attacks=[{"name": "tests.faults:Raises", "clients": [1]}]), "t")
    assert type(config.attacks[0].build()).__name__ == "Raises"


def test_overrides_reach_nested_values_and_list_elements() -> None:
    values = raw()
    apply_overrides(
        values,
        [
            "training.lr=0.5",
            "attacks.0.factor=-3",
            "model.hidden=[1, 2]",
            "description=some words",
            "seed = 7",
        ],
    )
    config = load(values, "t")
    assert (config.training.lr, config.model.settings()["hidden"], config.seed) == (0.5, (1, 2), 7)
    assert config.attacks[0].settings()["factor"] == -3
    assert config.description == "some words"


def test_a_new_name_drops_the_old_parts_settings_but_not_what_every_part_has() -> None:
    values = raw()
    apply_overrides(values, ["partition.classes_per_client=3", "partition.name=shards"])
    assert values["partition"] == {"name": "shards", "clients": 10, "classes_per_client": 3}
    apply_overrides(values, ["partition.name=shards"])
    assert values["partition"]["classes_per_client"] == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("training.lr", "expected KEY=VALUE"),
        ("=3", "expected KEY=VALUE"),
        ("rounds.a=3", "'rounds' is a value, not a table"),
        ("attacks.1.factor=3", "'1' is not one of the elements 0 to 0"),
    ],
)
def test_an_override_that_cannot_be_applied_is_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        apply_overrides(raw(), [text])


def test_unknown_scenarios_and_files_that_are_not_toml_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="did you mean 'quickstart'"):
        read_scenario("quickstrat")
    with pytest.raises(UserError, match="there is no such file"):
        read_scenario("no/such.toml")
    (tmp_path / "bad.toml").write_text("rounds = = 3")
    with pytest.raises(UserError, match="not a TOML file"):
        read_scenario(str(tmp_path / "bad.toml"))


def test_strategy_names_are_split_at_commas() -> None:
    assert strategy_names(["mean, median", "x"]) == ["mean", "median", "x"]


def test_a_strategy_may_be_compared_with_itself_under_another_name() -> None:
    tables = {"trimmed-mean": {"beta": 0.1}, "half": {"name": "trimmed-mean", "beta": 0.4}}
    config = load(raw(strategies=["trimmed-mean", "half"], strategy=tables), "test.toml")
    parts = [config.strategy_part(name) for name in config.strategies]
    assert [part.name for part in parts] == ["trimmed-mean", "trimmed-mean"]
    assert [part.settings()["beta"] for part in parts] == [0.1, 0.4]
    assert load(config.to_dict(), "again").digest() == config.digest()
    with pytest.raises(UserError, match="letters, digits"):
        load(raw(strategies=["a/b"], strategy={"a/b": {"name": "mean"}}), "test.toml")
    with pytest.raises(UserError, match=r"strategy.half.name: .*did you mean 'median'"):
        load(raw(strategies=["half"], strategy={"half": {"name": "medain"}}), "test.toml")


def test_a_variant_replaces_values_and_gets_a_name_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        'rounds = 5\nvariant = "short"\n[data]\nname = "digits"\n[training]\nlr = 0.1\nmomentum = 0.5\n'
        "[variants.short]\nrounds = 1\n[variants.fast]\ntraining.lr = 0.5\n"
    )
    usual, _ = read_scenario(str(path))
    assert (usual["name"], usual["rounds"]) == ("mine-short", 1)
    fast, _ = read_scenario(f"{path}:fast")
    assert (fast["name"], fast["rounds"]) == ("mine-fast", 5)
    assert fast["training"] == {"lr": 0.5, "momentum": 0.5}
    assert variant_names(str(path)) == ["short", "fast"]
    with pytest.raises(UserError, match=r"mine.toml: unknown variant 'fsat': did you mean 'fast'"):
        read_scenario(f"{path}:fsat")


def test_steps_before_a_rule_are_part_of_the_strategys_table() -> None:
    tables = {"krum": {"before": [{"name": "bucketing", "size": 3}, {"name": "arc"}]}}
    config = load(raw(strategies=["krum"], strategy=tables), "test.toml")
    steps = [step.build() for step in config.strategy_part("krum").before]
    assert [type(step).__name__ for step in steps] == ["Bucketing", "AdaptiveClipping"]
    assert steps[0].size == 3
    assert load(config.to_dict(), "again").digest() == config.digest()
    with pytest.raises(UserError, match=r"strategy.krum.before.0.name: .*did you mean 'bucketing'"):
        load(raw(strategies=["krum"], strategy={"krum": {"before": [{"name": "bucketting"}]}}), "test.toml")
    wrong = {"krum": {"before": [{"name": "bucketing", "size": 0}]}}
    with pytest.raises(UserError, match=r"strategy.krum.before.0.size"):
        load(raw(strategies=["krum"], strategy=wrong), "test.toml")


def test_a_wrong_key_of_a_strategys_sub_models_is_told_with_those_allowed() -> None:
    part = {"name": "mean", "submodels": {"name": "heterofl", "width": [1.0]}}
    raw = {
        "name": "x", "rounds": 1, "strategies": ["a"], "data": {"name": "digits"}, "model": {"name": "mlp"},
        "partition": {"name": "iid", "clients": 4}, "strategy": {"a": part},
    }  # fmt: skip
    with pytest.raises(UserError, match=r"strategy.a.submodels.width: unknown key; did you mean 'widths'\?"):
        load(raw, "x.toml")


def test_samples_of_the_servers_own_stay_in_a_configuration_without_sub_models() -> None:
    raw = {
        "name": "x", "rounds": 1, "strategies": ["server-alone"], "data": {"name": "digits"},
        "model": {"name": "mlp"}, "partition": {"name": "iid", "clients": 4},
        "submodels": {"public_samples": 100},
    }  # fmt: skip
    config = load(raw, "x.toml")
    assert config.to_dict()["submodels"] == {"name": "full", "public_samples": 100}
    assert load(config.to_dict(), "x.toml").digest() == config.digest()


def test_a_schema_is_made_once_and_anew_for_what_is_behind_a_name_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert type(load(raw(), "one").model) is type(load(raw(), "other").model)
    (tmp_path / "own_part.py").write_text("def made(shape, classes, *, width: int = 3): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    own = raw(model={"name": "own_part:made"})
    assert load(own, "test").model.settings() == {"width": 3}

    def deeper(shape: Any, classes: int, *, depth: int = 2) -> None: ...

    monkeypatch.setattr("own_part.made", deeper)
    assert load(own, "test").model.settings() == {"depth": 2}
