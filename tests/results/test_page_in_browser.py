"""The page in a real browser, from a file and from a server that a run keeps writing for."""

import json
import shutil
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from fedplat.results.folder import RunFolder
from fedplat.results.page import page_data, page_html, write_page, write_table_page
from fedplat.verdicts import HONEST, UNTARGETED

from . import client_record, make_run, round_record
from .test_page import HOSTILE
from .test_page_of_tables import table_folder

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
]

DONE_S = 60
CHARTS = "document.querySelectorAll('.chart.js-plotly-plot').length"
SHOWN = "Array.from(document.querySelectorAll('.chart')).filter(c => !c.parentElement.hidden).length"
NAMES = """Array.from(document.querySelectorAll('#table-comparison tbody th'))
    .map(head => head.textContent.split(' ')[0])"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    path = tmp_path_factory.mktemp("page") / "run"
    rows = [
        client_record(number, c) | {"verdict": UNTARGETED if c == 3 else HONEST, "credibility": c / number}
        for number in (1, 2)
        for c in range(4)
    ]
    accuracies = {"mean": [0.1, 0.5, 0.09], "median": [0.1, 0.6, 0.7], "fed-credit": [0.1, 0.3, 0.65]}
    made = make_run(path, accuracies, clients={"fed-credit": rows}, description=HOSTILE)
    made.describe(label_counts=[[1, 2], [3, 4], [5, 6], [7, 8]], samples_per_client=[3, 7, 11, 15])
    made.describe(classes=["cat", HOSTILE], attackers={"3": "sign-flip"})
    write_page([made], path / "report.html")
    return made


class Opened:
    """A page that was opened, with what its browser complained of and asked for."""

    def __init__(self, browser: Any, address: str, **settings: Any) -> None:
        self.problems: list[str] = []
        self.asked: list[str] = []
        self.context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **settings})
        self.page = self.context.new_page()
        self.page.on(
            "console", lambda m: self.problems.append(m.text) if m.type in ("error", "warning") else None
        )
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)
        self.page.wait_for_selector(".js-plotly-plot svg.main-svg", timeout=1000 * DONE_S)

    def scroll_through(self) -> None:
        """Let every chart come into sight once."""
        self.page.evaluate("document.querySelectorAll('.chart').forEach(c => c.scrollIntoView())")
        self.page.emulate_media(media="print")
        self.page.evaluate("dispatchEvent(new Event('beforeprint'))")
        self.page.emulate_media(media="screen")
        self.page.evaluate("scrollTo(0, 0)")

    def value(self, script: str) -> Any:
        return self.page.evaluate(script)

    def until(self, script: str) -> None:
        """Wait until an expression is true; the page's policy forbids the usual way of waiting."""
        deadline = time.monotonic() + DONE_S
        while not self.value(script):
            assert time.monotonic() < deadline, script
            self.page.wait_for_timeout(100)


@pytest.fixture(scope="module")
def opened(browser: Any, run: RunFolder) -> Iterator[Opened]:
    page = Opened(browser, (run.path / "report.html").as_uri())
    yield page
    page.context.close()


def test_every_chart_is_drawn_without_a_word_on_the_console_or_the_network(
    opened: Opened, run: RunFolder
) -> None:
    opened.scroll_through()
    shown = opened.value(SHOWN)
    assert shown >= 8
    assert opened.value(CHARTS) == shown
    assert opened.value("document.querySelectorAll('#chart-accuracy .scatterlayer .trace').length") == 3
    assert opened.value("document.querySelectorAll('#chart-partition .bars .point').length") == 8
    assert opened.problems == []
    elsewhere = [url for url in opened.asked if not url.startswith(("data:", "blob:"))]
    assert elsewhere == [(run.path / "report.html").as_uri()]


def test_a_click_on_a_heading_sorts_by_number_and_another_turns_it_around(opened: Opened) -> None:
    assert opened.value(NAMES) == ["mean", "median", "fed-credit"]
    head = opened.page.locator("#table-comparison thead button", has_text="accuracy %").first
    head.click()
    assert opened.value(NAMES) == ["median", "fed-credit", "mean"]
    assert head.locator("..").get_attribute("aria-sort") == "descending"
    head.click()
    assert opened.value(NAMES) == ["mean", "fed-credit", "median"]
    opened.page.locator("#table-comparison thead button", has_text="strategy").click()
    assert opened.value(NAMES) == ["fed-credit", "mean", "median"]


def test_a_choice_draws_the_clients_of_another_strategy_or_score(opened: Opened) -> None:
    opened.scroll_through()
    title = "document.querySelector('#chart-weights').data[0].colorbar.title.text"
    assert opened.value(title) == "weight, %"
    opened.page.select_option("[data-choice=weights]", "credibility")
    assert opened.value(title) == "credibility"


def test_a_loss_can_be_seen_on_a_logarithmic_axis(opened: Opened) -> None:
    article = opened.page.locator("article", has=opened.page.locator("#chart-loss"))
    box = article.locator("input[type=checkbox]")
    box.check()
    assert opened.value("document.querySelector('#chart-loss').layout.yaxis.type") == "log"


def test_a_hostile_name_is_shown_and_does_nothing(opened: Opened) -> None:
    assert HOSTILE in opened.page.inner_text("header")
    opened.scroll_through()
    assert HOSTILE in opened.page.text_content("#chart-partition .legend")
    assert opened.value("document.querySelectorAll('main b').length") == 0


def test_a_phone_scrolls_tables_and_not_the_page(browser: Any, run: RunFolder) -> None:
    phone = {"viewport": {"width": 360, "height": 740}, "is_mobile": True, "has_touch": True}
    opened = Opened(browser, (run.path / "report.html").as_uri(), **phone)
    opened.scroll_through()
    assert opened.value("document.documentElement.scrollWidth") == 360
    ends = "Array.from(document.querySelectorAll('.chart svg')).map(s => s.getBoundingClientRect().right)"
    assert max(opened.value(ends)) <= 360
    box = "document.querySelector('#comparison .scroll')"
    assert opened.value(f"{box}.scrollWidth > {box}.clientWidth")
    assert opened.problems == []
    opened.context.close()


CONTRAST = """(selector) => {
  const luminance = (text) => {
    const linear = (v) => (v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    const [red, green, blue] = text.match(/[\\d.]+/g).slice(0, 3).map((v) => linear(v / 255));
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
  };
  const node = document.querySelector(selector);
  const style = getComputedStyle(node);
  const text = luminance(node instanceof SVGElement ? style.fill : style.color);
  const behind = luminance(getComputedStyle(document.body).backgroundColor);
  return (Math.max(text, behind) + 0.05) / (Math.min(text, behind) + 0.05);
}"""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_texts_can_be_read_in_both_schemes(browser: Any, run: RunFolder, scheme: str) -> None:
    opened = Opened(browser, (run.path / "report.html").as_uri(), color_scheme=scheme)
    for selector in (
        "h1",
        "#status",
        ".about",
        "dt",
        "summary",
        "#chart-accuracy .xtick text",
        "#chart-accuracy .xtitle",
    ):
        assert opened.page.evaluate(CONTRAST, selector) >= 4.5, selector
    opened.context.close()


def test_charts_follow_a_change_of_scheme(opened: Opened) -> None:
    background = "getComputedStyle(document.body).backgroundColor"
    line = "document.querySelector('#chart-accuracy').data[0].line.color"
    light = opened.value(background), opened.value(line)
    opened.page.emulate_media(color_scheme="dark")
    opened.until(f"{line} !== '{light[1]}'")
    assert opened.value(background) != light[0]
    opened.page.emulate_media(color_scheme="light")


def test_without_scripts_the_table_and_the_configuration_are_there(browser: Any, run: RunFolder) -> None:
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto((run.path / "report.html").as_uri())
    assert page.locator("#table-comparison tbody tr").count() == 3
    assert "JavaScript" in page.inner_text("main")
    assert page.locator("pre", has_text="[[attacks]]").count() == 1
    context.close()


def test_a_browser_without_inflating_is_told(browser: Any, run: RunFolder) -> None:
    context = browser.new_context()
    context.add_init_script("delete globalThis.DecompressionStream")
    page = context.new_page()
    page.goto((run.path / "report.html").as_uri())
    page.wait_for_selector("#trouble:not([hidden])")
    assert "too old" in page.inner_text("#trouble")
    context.close()


def test_the_page_of_a_table_has_curves_and_a_choice_of_block(browser: Any, tmp_path: Path) -> None:
    opened = Opened(browser, write_table_page(table_folder(tmp_path)).as_uri())
    assert opened.value(CHARTS) == 2
    assert opened.page.locator("#tables article:visible").count() == 2
    opened.page.select_option("[data-choice=block]", "Y")
    assert opened.page.locator("#tables article:visible").count() == 1
    assert opened.problems == []
    opened.context.close()


def test_a_live_page_follows_a_run_keeps_the_zoom_and_stops_at_its_end(browser: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", {"mean": [0.1, 0.5], "median": [0.1, 0.6]}, finished=False)
    polls = [0]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            data = page_data([RunFolder.existing(folder.path)])
            live = self.path == "/"
            polls[0] += not live
            content = (page_html(data, live=True) if live else json.dumps(data)).encode()
            self.send_response(200 if self.path in ("/", "/data.json") else 404)
            self.send_header("Content-Type", "text/html; charset=utf-8" if live else "application/json")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        opened = Opened(browser, f"http://127.0.0.1:{server.server_port}/")
        page = opened.page
        opened.until("document.querySelector('#status').textContent.startsWith('running')")
        page.locator("#table-comparison thead button", has_text="accuracy %").first.click()
        drag = page.locator("#chart-accuracy .nsewdrag").first.bounding_box()
        page.mouse.move(drag["x"] + drag["width"] / 4, drag["y"] + drag["height"] / 2)
        page.mouse.down()
        page.mouse.move(drag["x"] + drag["width"] / 2, drag["y"] + drag["height"] / 2, steps=5)
        page.mouse.up()
        zoomed = "document.querySelector('#chart-accuracy').layout.xaxis.range"
        opened.until(f"{zoomed}[0] > 0.5")
        chosen = opened.value(zoomed)
        for name, accuracy in (("mean", 0.9), ("median", 0.2)):
            folder.log(name).append(round_record(2, accuracy), [])
        opened.until("document.querySelector('#chart-accuracy').data[0].x.length === 3")
        assert opened.value(zoomed) == chosen
        assert opened.value(NAMES) == ["mean", "median"]
        for name in ("mean", "median"):
            folder.log(name).save_model({})
        opened.until("document.querySelector('#status').textContent.startsWith('finished')")
        before = polls[0]
        page.wait_for_timeout(3500)
        assert polls[0] == before
        assert opened.problems == []
        opened.context.close()
    finally:
        server.shutdown()
        server.server_close()
