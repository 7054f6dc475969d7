import base64
import json
import re
import subprocess
import sys
import zlib
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from fedplat.cli import main
from fedplat.errors import UserError
from fedplat.results.folder import RunFolder
from fedplat.results.page import page_data, page_html, write_page
from fedplat.results.page.clients import Clients, confusion, thinned, value_view, verdict_view
from fedplat.results.page.plotly_js import library
from fedplat.results.report import write_report
from fedplat.verdicts import HONEST, TARGETED, UNRELIABLE, UNTARGETED

from . import client_record, make_run, round_record

HOSTILE = "</script><b>&\"'"


def chart_of(data: dict[str, Any], name: str) -> dict[str, Any]:
    return next(chart for section in data["sections"] for chart in section["charts"] if chart["id"] == name)


def traces_of(data: dict[str, Any], name: str, section: int = 0, option: int = 0) -> list[dict[str, Any]]:
    traces: list[dict[str, Any]] = chart_of(data, name)["views"][section][option]["traces"]
    return traces


def cell_of(data: dict[str, Any], row: int, head: str) -> dict[str, Any]:
    table = data["tables"][0]
    cell: dict[str, Any] = table["rows"][row]["cells"][table["heads"].index(head) - 1]
    return cell


def two_seeds(tmp_path: Path) -> list[RunFolder]:
    return [
        make_run(tmp_path / "one", {"mean": [0.1, 0.5, 0.7], "median": [0.1, 0.6, 0.6]}, seed=1),
        make_run(tmp_path / "two", {"mean": [0.1, 0.3, 0.9], "median": [0.1, 0.6, 0.6]}, seed=2),
    ]


def row(number: int, client: int, verdict: str, truth: str, attack: str = "", **more: Any) -> dict[str, Any]:
    return client_record(number, client) | {"verdict": verdict, "truth": truth, "attack": attack} | more


JUDGED = [
    row(1, 0, HONEST, HONEST),
    row(1, 1, UNTARGETED, HONEST),
    row(1, 2, TARGETED, TARGETED, "backdoor", weight=0.0),
    row(1, 3, "", UNTARGETED, "sign-flip", status="refused", weight=0.0),
    row(2, 0, HONEST, HONEST),
    row(2, 1, HONEST, HONEST),
    row(2, 2, UNTARGETED, TARGETED, "backdoor", weight=0.0),
    row(2, 3, "", UNTARGETED, "sign-flip", status="failed", reason="late: 3 s of 2 s", weight=0.0),
]


# Seeds -----------------------------------------------------------------------------------------------------


def test_lines_are_means_over_the_seeds_and_bands_reach_from_the_lowest_to_the_highest(
    tmp_path: Path,
) -> None:
    low, high, mean = traces_of(page_data(two_seeds(tmp_path)), "accuracy")[:3]
    assert mean["x"] == [0, 1, 2]
    assert mean["y"] == [10, 40, 80]
    assert low["y"] == [10, 30, 70]
    assert high["y"] == [10, 50, 90]
    assert high["fill"] == "tonexty"


def test_one_seed_has_no_band(tmp_path: Path) -> None:
    traces = traces_of(page_data([make_run(tmp_path / "run", {"mean": [0.1, 0.5]})]), "accuracy")
    assert [trace["y"] for trace in traces] == [[10, 50]]


def test_the_table_has_mean_and_deviation_over_the_seeds(tmp_path: Path) -> None:
    data = page_data(two_seeds(tmp_path))
    assert cell_of(data, 0, "accuracy %")["t"] == "80.00 ± 14.14"
    assert cell_of(data, 0, "accuracy %")["v"] == pytest.approx(0.8)
    assert cell_of(data, 1, "accuracy %")["t"] == "60.00 ± 0.00"
    assert cell_of(data, 0, "accuracy %")["best"]
    assert "best" not in cell_of(data, 1, "accuracy %")
    assert data["seeds"] == [1, 2]
    assert len(data["commands"]) == 2


def test_equal_figures_are_not_the_best(tmp_path: Path) -> None:
    data = page_data(two_seeds(tmp_path))
    assert "best" not in cell_of(data, 0, "loss")


def test_a_seed_that_is_behind_counts_where_it_has_been(tmp_path: Path) -> None:
    runs = [
        make_run(tmp_path / "one", {"mean": [0.1, 0.5, 0.7]}, seed=1),
        make_run(tmp_path / "two", {"mean": [0.1, 0.3]}, seed=2, finished=False),
    ]
    data = page_data(runs)
    assert traces_of(data, "accuracy")[-1]["y"] == [10, 40, 70]
    assert data["status"]["state"] == "unfinished"
    assert data["status"]["done"] == {"mean": 1}


def test_runs_that_differ_in_more_than_the_seed_are_refused_with_what_differs(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", {"mean": [0.1]}, seed=1)
    other = make_run(tmp_path / "two", {"mean": [0.1]}, seed=2, rounds=9)
    with pytest.raises(UserError, match=r"more than the seed: rounds = 4 and 9\."):
        page_data([one, other])


def test_the_same_seed_twice_is_refused(tmp_path: Path) -> None:
    one = make_run(tmp_path / "one", {"mean": [0.1]}, seed=1)
    with pytest.raises(UserError, match="same seed"):
        page_data([one, make_run(tmp_path / "two", {"mean": [0.1]}, seed=1)])
    with pytest.raises(UserError, match="no run"):
        page_data([])


# Clients ---------------------------------------------------------------------------------------------------


def test_the_mix_ups_are_counted_by_kind_and_verdict() -> None:
    truths, states, counts = confusion(Clients.of(JUDGED))
    assert truths == [HONEST, "backdoor (targeted)", "sign-flip (untargeted)"]
    assert states == [HONEST, UNRELIABLE, UNTARGETED, TARGETED, "refused"]
    assert counts == [[3, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 1]]


def test_the_last_rounds_can_be_counted_alone() -> None:
    truths, states, counts = confusion(Clients.of(JUDGED), late=1)
    assert truths == [HONEST, "backdoor (targeted)"]
    assert states == [HONEST, UNRELIABLE, UNTARGETED, TARGETED]
    assert counts == [[2, 0, 0, 0], [0, 0, 1, 0]]


def test_without_verdicts_no_weight_is_what_a_client_is_taken_for() -> None:
    rows = [client_record(1, c) | {"weight": 0.0 if c == 3 else 0.3} for c in range(4)]
    truths, states, counts = confusion(Clients.of(rows))
    assert (truths, states) == ([HONEST, "sign-flip (untargeted)"], ["part of the model", "no weight"])
    assert counts == [[3, 0], [0, 1]]


def test_what_became_of_a_client_has_a_letter_per_round() -> None:
    view = verdict_view(Clients.of(JUDGED[:7]))
    assert view is not None
    trace = view["traces"][0]
    assert trace["y"] == ["0", "1", "2", "3"]
    words = [
        [trace["words"][ord(letter) - 97] if letter != "." else None for letter in row]
        for row in trace["letters"]
    ]
    assert words == [[HONEST, HONEST], [UNTARGETED, HONEST], [TARGETED, UNTARGETED], ["refused", None]]


def test_a_rule_that_lets_everybody_in_has_no_picture_of_verdicts() -> None:
    assert verdict_view(Clients.of([client_record(1, c) for c in range(4)])) is None


def test_weights_are_percent_and_missing_rounds_stay_open() -> None:
    view = value_view(Clients.of([client_record(1, 0), client_record(1, 1), client_record(2, 1)]), "weight")
    assert view is not None
    assert view["traces"][0]["z"] == [[25, None], [25, 25]]


def test_scores_of_a_rule_can_be_chosen(tmp_path: Path) -> None:
    rows = [client_record(1, c) | {"credibility": c / 10} for c in range(4)]
    data = page_data([make_run(tmp_path / "run", {"fed-credit": [0.1, 0.5]}, clients={"fed-credit": rows})])
    assert chart_of(data, "weights")["options"] == ["weight", "credibility"]
    assert traces_of(data, "weights", option=1)[0]["z"] == [[0], [0.1], [0.2], [0.3]]


def test_many_clients_and_rounds_are_thinned_and_the_page_says_so(tmp_path: Path) -> None:
    clients, rounds, note = thinned(range(1000), range(1, 401), 100_000)
    assert (len(clients), len(rounds)) == (500, 200)
    assert (clients[-1], rounds[-1]) == (999, 400)
    assert note == "Shown are 500 of 1,000 clients and 200 of 400 rounds, evenly picked."
    rows = [client_record(number, c) | {"weight": 1 / 3} for number in range(1, 251) for c in range(20)]
    run = make_run(tmp_path / "run", {"mean": [0.1]}, clients={"mean": rows})
    run.log("mean").append(round_record(250, 0.5), rows)
    view = chart_of(page_data([run]), "weights")["views"][0][0]
    assert "200 of 250 rounds" in view["note"]
    assert len(view["traces"][0]["z"][0]) == 200
    assert view["traces"][0]["z"][0][0] == 33.3


# Facts -----------------------------------------------------------------------------------------------------


def test_the_partition_is_drawn_by_class_where_it_is_recorded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"mean": [0.1]})
    run.describe(samples_per_client=[3, 4], attackers={"1": "sign-flip"}, classes=["cat", "dog"])
    assert [trace["y"] for trace in traces_of(page_data([run]), "partition")] == [[3, 4]]
    run.describe(label_counts=[[1, 2], [4, 0]])
    traces = traces_of(page_data([run]), "partition")
    assert [trace["name"] for trace in traces] == ["cat", "dog"]
    assert [trace["y"] for trace in traces] == [[1, 4], [2, 0]]
    assert traces[0]["x"] == ["0", "1*"]


def test_costs_are_drawn_over_the_rounds(tmp_path: Path) -> None:
    data = page_data([make_run(tmp_path / "run", {"mean": [0.1, 0.5, 0.6]})])
    assert traces_of(data, "seconds")[0]["y"] == [2.75, 2.75]
    assert traces_of(data, "bytes")[0]["y"] == [3, 3]
    assert "MB" in chart_of(data, "bytes")["views"][0][0]["layout"]["yaxis"]["title"]["text"]


def test_simulated_costs_are_there_when_they_were_recorded(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"mean": [0.1]})
    for number in (1, 2):
        simulated = {"seconds": 30.0, "joules": 4.0, "late": number, "asked": 4, "delivered": 3}
        run.log("mean").append(round_record(number, 0.5, simulated=simulated), [])
    data = page_data([RunFolder.existing(run.path)])
    assert traces_of(data, "simulated-seconds")[0]["y"] == [30, 30]
    assert traces_of(data, "joules")[0]["y"] == [4, 4]
    assert chart_of(data, "missed")["options"] == ["late"]
    assert traces_of(data, "progress")[0]["x"] == [30, 60]


def test_edges_have_their_costs(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"mean": [0.1]})
    edges = {"cost": 0.8, "healthy": 0.5, "bytes_down": 10, "bytes_up": 20}
    run.log("mean").append(round_record(1, 0.5, edges=edges), [])
    data = page_data([RunFolder.existing(run.path)])
    assert chart_of(data, "edges")["options"] == ["cost", "healthy edges"]
    assert traces_of(data, "edges")[0]["y"] == [0.8]


def test_the_data_are_plain_json_of_which_nothing_is_shared_with_the_records(tmp_path: Path) -> None:
    runs = two_seeds(tmp_path)
    data = page_data(runs)
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert page_data(runs) == data


def test_a_loss_that_is_not_finite_ends_its_line(tmp_path: Path) -> None:
    data = page_data([make_run(tmp_path / "run", {"mean": [0.1, 0.1]}, loss=float("inf"))])
    assert traces_of(data, "loss")[0]["x"] == [0]
    assert data["tables"][0]["rows"][0]["name"] == "mean (round 1 of 4, diverged)"


# The file --------------------------------------------------------------------------------------------------


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_a_hostile_name_stays_text(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"mean": [0.1, 0.5]}, name="x", description=HOSTILE)
    run.describe(data_note=HOSTILE, classes=[HOSTILE, "b"], label_counts=[[1, 2]], samples_per_client=[3])
    text = page_html(page_data([run]))
    found = Elements()
    found.feed(text)
    assert [tag for tag, _ in found.tags if tag == "b"] == []
    assert sum(tag == "script" for tag, _ in found.tags) == 3
    inside = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert inside
    assert json.loads(inside[1])["description"] == HOSTILE


def test_nothing_is_loaded_from_elsewhere(tmp_path: Path) -> None:
    found = Elements()
    found.feed(page_html(page_data([make_run(tmp_path / "run", {"mean": [0.1, 0.5]})])))
    links = [a.get("src") or a.get("href") for _, a in found.tags if a.get("src") or a.get("href")]
    assert links == ["data:,"]
    assert not [key for _, attributes in found.tags for key in attributes if key.startswith("on")]
    policy = next(a["content"] for t, a in found.tags if t == "meta" and a.get("http-equiv"))
    assert policy
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy


def test_only_a_live_page_may_ask_its_server(tmp_path: Path) -> None:
    data = page_data([make_run(tmp_path / "run", {"mean": [0.1, 0.5]})])
    assert "connect-src 'self'" in page_html(data, live=True)
    assert '<html lang="en" data-live>' in page_html(data, live=True)


def test_tables_and_configuration_are_there_without_scripts(tmp_path: Path) -> None:
    text = page_html(page_data([make_run(tmp_path / "run", {"mean": [0.1, 0.5], "median": [0.1, 0.6]})]))
    before = text.partition('<script type="application/json"')[0]
    assert '<td data-v="0.6"><strong>60.00</strong></td>' in before
    assert "[[attacks]]" in before
    assert f"fedplat run {tmp_path}/run/config.toml" in before
    assert "<noscript>" in before


def test_plotly_is_embedded_whole() -> None:
    import plotly.offline

    packed = zlib.decompress(base64.b64decode(library().packed), 31).decode()
    assert packed == plotly.offline.get_plotlyjs()


def test_a_report_writes_the_page(tmp_path: Path) -> None:
    write_report(make_run(tmp_path / "run", {"mean": [0.1, 0.5]}))
    page = tmp_path / "run" / "report.html"
    assert 1_000_000 < page.stat().st_size < 2_500_000
    assert not list((tmp_path / "run").glob("*.tmp"))


def test_making_a_page_imports_no_chart_library() -> None:
    code = (
        "import sys; import fedplat.results.page as page; "
        "print({'torch', 'plotly', 'pandas', 'matplotlib'} & {*sys.modules})"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "set()\n"


# The command -----------------------------------------------------------------------------------------------


def test_several_seeds_get_one_page_in_the_first_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_seeds(tmp_path)
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert "page over seeds 1, 2" in capsys.readouterr().out
    assert "80.00 ± 14.14" in (tmp_path / "one" / "report.html").read_text()
    assert not (tmp_path / "two" / "report.html").exists()


def test_the_command_says_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_run(tmp_path / "one", {"mean": [0.1]}, seed=1)
    make_run(tmp_path / "two", {"mean": [0.1]}, seed=2, rounds=9)
    assert main(["report", str(tmp_path / "one"), str(tmp_path / "two")]) == 2
    assert "rounds = 4 and 9" in capsys.readouterr().err


def test_a_page_of_one_run_is_the_same_twice(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", {"mean": [0.1, 0.5]})
    write_page([run], tmp_path / "a.html")
    write_page([run], tmp_path / "b.html")
    assert (tmp_path / "a.html").read_bytes() == (tmp_path / "b.html").read_bytes()
