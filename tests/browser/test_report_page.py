"""The page of a report in Chromium: it renders, sorts, filters, folds, and complains of nothing."""

import re
from pathlib import Path

import pytest

from tests.browser.conftest import make_report
from tests.fast.examples.experimental.nemo_gym.made_runs import write_run
from tests.fast.examples.experimental.nemo_gym.made_scans import hostile_scans, make_scans

ROWS = "[...document.querySelectorAll('#table tbody tr:not(.detail)')]"


@pytest.fixture(scope="module")
def report(tmp_path_factory) -> Path:
    """Of 300 tasks, with two policies to compare, and a run."""
    folder = tmp_path_factory.mktemp("report")
    return make_report(folder / "report.html", *make_scans(folder, tasks=300).values(), write_run(folder / "dump"))


def column(page, number: int) -> list[str]:
    return page.run(f"{ROWS}.map(row => row.cells[{number}].textContent)")


def click(page, selector: str) -> None:
    page.run(f"document.querySelector({selector!r}).click()")


def choose(page, name: str, value: str) -> None:
    page.run(
        f"(field => {{ field.value = {value!r}; field.dispatchEvent(new Event('input', {{bubbles: true}})); }})"
        f"(document.getElementById('filter-{name}'))"
    )


def shown(page) -> str:
    return page.run("document.getElementById('shown').textContent")


def test_renders(report, open_page):
    page = open_page(report)
    verdict = page.run("document.getElementById('verdict').innerText")
    assert re.match(r"Drop \d+ and rescan \d+ of 300 tasks; on the other \d+ the policy can learn from \d+", verdict)
    assert page.run("document.querySelectorAll('svg').length") == 5
    sizes = page.run(
        "[...document.querySelectorAll('svg')].map(svg => [svg.getBoundingClientRect().width, "
        "svg.querySelectorAll('path').length])"
    )
    assert all(width > 300 and paths > 10 for width, paths in sizes)
    split = page.run("[...document.querySelectorAll('.split button')].map(one => one.getBoundingClientRect().width)")
    counts = page.run("[...document.querySelectorAll('.card .count')].map(one => parseInt(one.textContent))")
    assert len(split) == len(counts) == 5 and sum(counts) == 300
    assert max(split) / min(split) == pytest.approx(max(counts) / min(counts), rel=0.3)
    assert len(column(page, 0)) == 200 and shown(page) == "300 of 300 tasks"
    click(page, "#more")
    assert len(column(page, 0)) == 300 and page.run("document.getElementById('more').hidden")


def test_sorts_by_every_column_both_ways(report, open_page):
    page = open_page(report)
    click(page, "#more")
    assert column(page, 2) == sorted(column(page, 2), key=["Drop", "Rescan", "Train on", "Too hard", "Too easy"].index)
    heads = page.run("[...document.querySelectorAll('#table thead th')].map(head => head.textContent)")
    assert heads == [
        *("task", "repository", "what to do", "golden.jsonl", "policy-base.jsonl", "policy-step-200.jsonl"),
        *("seconds", "ended as"),
    ]
    for number, read in (
        (0, str),
        (1, str),
        (6, float),
        (5, lambda text: eval(text.split()[0]) if "/" in text else 2),
    ):
        for direction in ("ascending", "descending"):
            page.run(
                f"document.querySelectorAll('#table thead button')[{number}].click(); document.getElementById('more').click()"
            )
            head = page.run(f"document.querySelectorAll('#table thead th')[{number}].getAttribute('aria-sort')")
            values = [read(text) for text in column(page, number)]
            known = [value for value in values if value != 2]
            assert head == direction and known == sorted(known, reverse=direction == "descending"), number
            assert values[: len(known)] == known, "what has no value comes last, whatever the direction"
    assert page.run("document.querySelectorAll('#table [aria-sort]').length") == 1


def test_filters(report, open_page):
    page = open_page(report)
    choose(page, "decision", "drop")
    dropped = column(page, 2)
    assert dropped and set(dropped) == {"Drop"} and shown(page) == f"{len(dropped)} of 300 tasks"
    choose(page, "repo", "example/webframe")
    assert 0 < len(column(page, 1)) < len(dropped) and set(column(page, 1)) == {"example/webframe"}
    page.run("document.querySelector('.filters').reset()")
    page.run("new Promise(done => setTimeout(done, 50))")
    assert shown(page) == "300 of 300 tasks"
    choose(page, "status", "SandboxUnavailable")
    assert all("SandboxUnavailable" in text for text in column(page, 7))
    choose(page, "status", "")
    choose(page, "text", "TOOMANYREQUESTS rescan")
    assert set(column(page, 2)) == {"Rescan"}, "errors are searched, whatever the case, and every word is looked for"
    choose(page, "text", "nothing is called so")
    assert column(page, 0) == [] and shown(page) == "0 of 300 tasks"


def test_bars_and_cards_lead_to_their_tasks(report, open_page):
    page = open_page(report)
    click(page, ".card [data-filter=decision][data-value=train]")
    assert set(column(page, 2)) == {"Train on"} and page.run("scrollY") > 500
    click(page, ".bars [data-value=TimeLimitExceeded]")
    assert all("TimeLimitExceeded" in text for text in column(page, 7)) and len(set(column(page, 2))) > 1
    click(page, ".repos [data-value='example/docs']")
    assert set(column(page, 1)) == {"example/docs"}
    click(page, ".changed [data-filter=text]")
    assert len(column(page, 0)) == 1


def test_a_row_folds_out_to_failing_tests_and_the_end_of_the_error(report, open_page):
    page = open_page(report)
    assert page.run("document.querySelectorAll('.detail').length") == 0
    choose(page, "text", "broken::none")
    choose(page, "text", "")
    choose(page, "decision", "drop")
    click(page, "#table td.id button")
    text = page.run("document.querySelector('.detail').innerText")
    assert "golden.jsonl" in text and "policy-base.jsonl" in text and "failing test" in text
    assert (
        re.search(r"tests/test_\d+\.py::test_", text)
        and "gold patch, pass" in text
        and "empty patch: reward 0" in text
    )
    choose(page, "decision", "rescan")
    click(page, "#table td.id button")
    text = page.run("document.querySelector('.detail').innerText")
    assert "last lines of the error" in text and "SandboxCreateError: pull of" in text and "no verdict" in text
    click(page, "#table td.id button")
    assert page.run("document.querySelectorAll('.detail').length") == 0
    assert page.run("document.querySelector('#table td.id button').ariaExpanded") == "false"


def test_ids_are_saved_one_a_line(report, open_page):
    page = open_page(report)
    click(page, "#more")
    dropped = [name for name, what in zip(column(page, 0), column(page, 2), strict=True) if what == "Drop"]
    page.run(
        "window.saved = []; URL.createObjectURL = blob => { blob.text().then(text => window.saved.push(text)); return '#'; };"
        "HTMLAnchorElement.prototype.click = function () { window.saved.push(this.download); }"
    )
    click(page, "[data-save=drop]")
    page.run("new Promise(done => setTimeout(done, 50))")
    name, text = page.run("window.saved")
    assert name == "drop.txt" and sorted(text.split()) == sorted(dropped) and text.endswith("\n")


CONTRASTS = """(() => {
  const parse = (text) => {
    const numbers = text.match(/[\\d.]+/g).map(Number);
    const scale = text.startsWith("color(") ? 255 : 1;
    return [...numbers.slice(0, 3).map((value) => value * scale), numbers.length > 3 ? numbers[3] : 1];
  };
  const over = (top, below) => top.slice(0, 3).map((value, i) => value * top[3] + below[i] * (1 - top[3]));
  const behind = (node) => {
    const layers = [];
    for (let at = node; at; at = at.parentElement) layers.push(parse(getComputedStyle(at).backgroundColor));
    return layers.reverse().reduce((below, layer) => over(layer, below), [255, 255, 255]);
  };
  const light = (rgb) => rgb.map((value) => value / 255)
    .map((value) => (value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4))
    .reduce((sum, value, i) => sum + value * [0.2126, 0.7152, 0.0722][i], 0);
  const walker = document.createTreeWalker(document.querySelector("main"), NodeFilter.SHOW_TEXT);
  const found = [];
  while (walker.nextNode()) {
    const node = walker.currentNode.parentElement;
    if (!walker.currentNode.textContent.trim() || !node.getClientRects().length || node.closest("script, option")) continue;
    const style = getComputedStyle(node);
    const back = behind(node);
    const front = over(parse(node instanceof SVGElement ? style.fill : style.color), back);
    const [high, low] = [light(front), light(back)].sort((a, b) => b - a);
    found.push([(high + 0.05) / (low + 0.05), node.className.baseVal || node.className || node.tagName, node.textContent.slice(0, 40)]);
  }
  return found.sort((a, b) => a[0] - b[0]);
})()"""


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_is_legible_in_light_and_dark(report, open_page, dark):
    page = open_page(report, dark=dark)
    click(page, "#table td.id button")
    background = page.run("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) < 200) == dark
    contrasts = page.run(CONTRASTS)
    assert len(contrasts) > 500
    assert [one for one in contrasts if one[0] < 4.5][:5] == [], "WCAG 2.1, 1.4.3: at least 4.5 to 1"


@pytest.mark.parametrize("width", [360, 768, 1280, 1920])
def test_no_screen_is_too_narrow(report, open_page, width):
    page = open_page(report, width=width)
    assert page.run("document.documentElement.scrollWidth") <= width
    small = page.run(
        "Math.min(...[...document.querySelectorAll('svg text')].map(text => text.getBoundingClientRect().height))"
    )
    assert small >= 9


def test_nothing_that_a_server_sent_runs(tmp_path, open_page):
    page = open_page(make_report(tmp_path / "report.html", *hostile_scans(tmp_path)))
    page.run(
        "window.alert = () => { throw new Error('alert') }; document.querySelectorAll('button').forEach(b => b.click())"
    )
    page.run("document.querySelector('.filters').reset()")
    page.run("new Promise(done => setTimeout(done, 50))")
    page.run("document.querySelectorAll('#table td.id button').forEach(b => b.click())")
    assert page.run("document.querySelectorAll('main img, main script, main a').length") == 1, "the data alone"
    assert page.run("document.querySelectorAll('.detail').length") == 2
    text = page.run("document.body.innerText")
    assert "<script>alert(1)</script>" in text and r"\u202egnp.exe" in text and "javascript:alert(5)" in text


def test_a_script_that_got_in_all_the_same_would_not_run(report, browser):
    page = browser.page()
    page.open(report)
    page.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))")
    page.run("document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.ran = 1\">')")
    page.run("new Promise(done => setTimeout(done, 100))")
    assert page.run("window.ran === undefined") and len(page.errors) >= 2
    assert all("Content Security Policy" in error for error in page.errors)
    page.call("Page.close")


def test_5000_tasks_are_there_within_3_seconds(tmp_path, browser):
    scans = make_scans(tmp_path, tasks=5000, golden_passes=1, passes=2)
    page = browser.page()
    assert page.open(make_report(tmp_path / "report.html", scans["golden"], scans["policy-base"])) < 3.0
    assert shown(page) == "5,000 of 5,000 tasks"
    search = "(field => { field.value = 'test_unicode'; field.dispatchEvent(new Event('input', {bubbles: true})); })"
    for what in (
        "document.querySelector('#table thead button').click()",
        f"{search}(document.getElementById('filter-text'))",
    ):
        assert seconds(page, what) < 3.0, what
    assert 100 < int(shown(page).split()[0].replace(",", "")) < 5000
    choose(page, "text", "")
    while not page.run("document.getElementById('more').hidden"):
        assert seconds(page, "document.getElementById('more').click()") < 3.0
    assert len(column(page, 0)) == 5000
    assert page.errors == [] and page.requests == []
    page.call("Page.close")


def seconds(page, script: str) -> float:
    """How long it takes, until the page is laid out anew."""
    before, after = "const start = performance.now()", "document.body.offsetHeight; return performance.now() - start"
    return page.run(f"(() => {{ {before}; {script}; {after}; }})()") / 1000


def test_bars_are_as_long_as_what_they_stand_for(report, open_page):
    page = open_page(report)
    bars = page.run(
        "[...document.querySelectorAll('.bars .track')].map(track => [track.querySelector('i')?.offsetWidth ?? 0, "
        "parseFloat(track.querySelector('b').textContent.split('·')[1].replace(/[^0-9]/g, ''))])"
    )
    longest, most = max(bars)
    assert len(bars) > 10 and most >= 90
    for length, share in bars:
        assert length == pytest.approx(longest * share / most, abs=0.02 * longest + 2), (length, share)
