from pathlib import Path

import pytest

from fedplat.errors import UserError
from fedplat.results.folder import RunFolder
from fedplat.results.report import report_text, write_report
from fedplat.results.summary import summarise

from . import client_record, make_run


def report_of(folder: RunFolder) -> str:
    return report_text(folder, summarise(folder))


def test_a_report_leaves_all_its_files(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"mean": [0.1, 0.5], "median": [0.1, 0.6]})
    write_report(folder)
    for name in ("summary.json", "report.md", "table.csv", "table.tex", "accuracy.png"):
        assert (tmp_path / "run" / name).stat().st_size > 0


def test_report_says_what_was_faced_and_how_to_run_it_again(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"mean": [0.1, 0.5]})
    folder.describe(
        data_note="a small copy",
        samples_per_client=[30, 40, 50, 60],
        attackers={"3": "sign-flip"},
        parameters=650,
    )
    text = report_of(folder)
    for part in (
        "# tiny",
        "- Clients: 4, with 30 to 60 training samples each, 180 in all",
        "- Partition: iid, shuffled, equal sizes (min_samples = 10)",
        "- Model: softmax, multinomial logistic regression, 650 parameters",
        "- Attack: clients 3: sign-flip",
        "- Attackers: 1 of 4 clients: sign-flip 3",
        "- Strategy mean: weighted or plain mean of the updates",
        "Note on the data: a small copy",
        "![Accuracy and loss over the rounds](accuracy.png)",
        f"fedplat run {tmp_path / 'run'}/config.toml",
        "None: every reply of every client was accepted.",
        "- python: ",
    ):
        assert part in text
    assert "not finished" not in text


def test_report_names_the_clients_whose_replies_were_left_out(tmp_path: Path) -> None:
    rows = [client_record(1, client, "refused", "not finite | bad") for client in (0, 3)]
    rows += [client_record(1, 2, "failed", "RuntimeError: out of luck\nTraceback")]
    text = report_of(make_run(tmp_path / "run", {"mean": [0.1, 0.5]}, clients={"mean": rows}))
    assert "| mean | 0, 3 (attacker) | not finite \\| bad (1x) | 1 | 0 | 1 to 1 |" in text
    assert "| mean | 2 | RuntimeError: out of luck (1x) | 0 | 1 | 1 to 1 |" in text


def test_an_unfinished_run_is_marked(tmp_path: Path) -> None:
    text = report_of(make_run(tmp_path / "run", {"mean": [0.1, 0.5], "median": []}, finished=False))
    assert "This run is not finished" in text
    assert "mean (round 1 of 4)" in text


def test_loss_is_told_against_a_run_in_which_nobody_attacks(tmp_path: Path) -> None:
    attacked = make_run(tmp_path / "attacked", {"mean": [0.1, 0.5], "median": [0.1, 0.75]})
    clean = make_run(tmp_path / "clean", {"mean": [0.1, 0.9]}, attacks=[])
    summary = write_report(attacked, clean)
    assert summary["strategies"]["mean"]["accuracy_loss"] == pytest.approx(0.4)
    assert "accuracy_loss" not in summary["strategies"]["median"]
    assert "| loss to clean run |" in (tmp_path / "attacked" / "report.md").read_text()


def test_another_situation_is_no_clean_run(tmp_path: Path) -> None:
    attacked = make_run(tmp_path / "attacked", {"mean": [0.1, 0.5]})
    with pytest.raises(UserError, match="it has attackers"):
        write_report(attacked, make_run(tmp_path / "other", {"mean": [0.1, 0.9]}))
    with pytest.raises(UserError, match="it differs in seed"):
        write_report(attacked, make_run(tmp_path / "seed", {"mean": [0.1, 0.9]}, seed=9, attacks=[]))


def test_a_rule_that_scores_clients_gets_a_picture_of_them(tmp_path: Path) -> None:
    rows = [client_record(n, c) | {"credibility": n / (c + 1)} for n in (1, 2, 3) for c in range(4)]
    folder = make_run(tmp_path / "run", {"mean": [0.1, 0.2, 0.3, 0.4]}, clients={"mean": rows})
    write_report(folder)
    assert (tmp_path / "run" / "mean" / "clients.png").stat().st_size > 10_000
    assert "(mean/clients.png)" in (tmp_path / "run" / "report.md").read_text()
