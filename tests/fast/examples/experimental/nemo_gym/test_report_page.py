"""The page of the report as a file. Needs jinja2 and matplotlib."""

import base64
import hashlib
import json
import os
import re
import resource
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from .made_runs import sample, write_events, write_run, write_samples
from .made_scans import EVIL, STEERING, hostile_scans, make_scans, record, write_lines
from .report_command import COMMAND, report_in, report_process


@pytest.fixture
def report(monkeypatch, tmp_path):
    return report_in(tmp_path, monkeypatch)


class Page(HTMLParser):
    """What a browser would see in a page: elements with their attributes, the text, the data for the table."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self._in: list[str] = []
        self.data = {}
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._in.append("data" if ("id", "data") in attrs else tag)

    def handle_endtag(self, tag):
        self._in.append("")

    def handle_data(self, data):
        inside = self._in[-1] if self._in else ""
        if inside == "data":
            self.data = json.loads(data)
        elif inside not in ("script", "style"):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def scans(tmp_path_factory) -> dict[str, Path]:
    return make_scans(tmp_path_factory.mktemp("scans"), tasks=60)


def test_the_page_and_the_terminal_tell_the_same(scans, tmp_path, report):
    done = report(*scans.values(), "-o", "report.html")
    assert (done.returncode, done.stderr) == (0, "")
    page = Page((tmp_path / "report.html").read_text())
    first, *lines = done.stdout.splitlines()
    assert re.fullmatch(r"Drop \d+ and rescan \d+ of 60 tasks; on the other \d+ the policy can learn from .*\.", first)
    assert first in page.text and lines[-1] == "report: report.html"
    for line in lines[:-1]:
        for cell in re.split(r"\s{2,}", line.removeprefix("note: ")):
            cell = re.sub(r"^policy-base.jsonl and policy-step-200.jsonl: ", "", cell)
            if not re.search(r"exit status|repository|drop|rescan|train on|too hard|too easy|\d to \d|\(95 %\)", cell):
                assert cell in page.text, cell
    assert len(page.data["rows"]) == 60
    assert os.listdir(tmp_path) == ["report.html"] and (tmp_path / "report.html").stat().st_mode & 0o777 == 0o644


def test_the_page_needs_nothing_but_itself(scans, tmp_path, report):
    report(*scans.values(), write_run(tmp_path / "dump"), "-o", "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page(text)
    for tag, attributes in page.elements:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base", "a"), tag
        for name, value in attributes.items():
            assert name not in ("src", "srcset", "action") and not name.startswith("on"), (tag, name)
            if name.endswith("href"):
                assert tag == "use" and value.startswith("#m"), (tag, value)
    assert not re.search(r"@import|@font-face|url\((?!#)", text)
    assert set(re.findall(r"https?://[^\s\"'<]+", re.sub(r"<code>.*?</code>", "", text))) <= {
        *("http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink")
    }


def test_only_the_pages_own_script_may_run(scans, tmp_path, report):
    report(scans["golden"], "-o", "report.html")
    text = (tmp_path / "report.html").read_text()
    [script] = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = [attributes["content"] for tag, attributes in Page(text).elements if "http-equiv" in attributes]
    assert f"script-src 'sha256-{allowed}';" in policy and policy.startswith("default-src 'none';")
    assert "innerHTML" not in script and "insertAdjacentHTML" not in script and "document.write" not in script


def test_the_same_scans_give_the_same_bytes(scans, tmp_path, report):
    report(scans["golden"], scans["policy-base"], "-o", "one.html")
    paths = map(str, (scans["golden"], scans["policy-base"]))
    assert report_process(*paths, "-o", "two.html", cwd=tmp_path, PYTHONHASHSEED="1").returncode == 0
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


# --- what a server may send -------------------------------------------------------


def test_nothing_that_a_server_sent_becomes_markup_or_steers_the_terminal(tmp_path, report):
    bad = {f"rollout/nemo_gym/exit_status/{EVIL}{STEERING}": 3.0, f"rollout/dynamic_filter/drop_{EVIL}": 2}
    bad |= {f"eval/nemo_gym/{EVIL}/mean_over_verdicts": 0.5, "rollout/raw_reward": 0.5, "rollout/step": 1}
    dump = write_events(tmp_path / "dump", [bad])
    done = report(*hostile_scans(tmp_path), dump, "-o", "report.html")
    assert (done.returncode, done.stderr) == (0, "")
    assert all(char == "\n" or char.isprintable() for char in done.stdout)
    text = (tmp_path / "report.html").read_text()
    assert all(char in "\n\t" or char.isprintable() for char in text)
    page = Page(text)
    assert "<img src=x onerror=alert(2)>" in page.text and r"\u202egnp.exe" in page.text and "{{7*7}}" in page.text
    assert [tag for tag, _ in page.elements].count("script") == 2 and "img" not in {tag for tag, _ in page.elements}
    assert [row["id"] for row in page.data["rows"]][1] == "javascript:alert(3)"
    assert "<script>alert" not in text and "<!--" not in text
    assert "javascript:" not in "".join(str(attributes.get("href")) for _, attributes in page.elements)


# --- the file -------------------------------------------------------------------


def test_a_folder_for_the_page_is_made(tmp_path, report):
    write_lines(tmp_path / "scan.jsonl", [record()])
    assert report("scan.jsonl", "-o", "outputs/a/report.html").returncode == 0
    assert (tmp_path / "outputs/a/report.html").is_file()


def test_a_scan_that_is_being_written_is_reported_and_left_as_it_is(tmp_path, report):
    path = write_lines(tmp_path / "scan.jsonl", [record("a__b-1"), record("a__b-2")])
    path.write_bytes(path.read_bytes()[:-20])
    before = path.read_bytes()
    done = report(path, "-o", "report.html")
    assert done.returncode == 0 and "note: scan.jsonl does not end with a whole line" in done.stdout
    assert path.read_bytes() == before and "is still running, or was killed" in (tmp_path / "report.html").read_text()


def test_a_full_disk_leaves_the_old_page_and_nothing_else(tmp_path, report):
    write_lines(tmp_path / "scan.jsonl", [record()])
    (tmp_path / "report.html").write_text("old")
    assert report("scan.jsonl", "-o", "warm.html").returncode == 0, "matplotlib has made its cache by now"
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        done = report("scan.jsonl", "-o", "report.html")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (
        done.returncode == 2
        and done.stderr == "error: expected to write --output report.html, found: File too large\n"
    )
    assert (tmp_path / "report.html").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "scan.jsonl", "warm.html"]


@pytest.mark.parametrize("output", ["dump/events/rollout_manager.jsonl", "dump/rollout_data/0.pt", "link/new.html"])
def test_the_page_is_not_written_among_the_files_of_a_dump(tmp_path, report, output):
    dump = write_run(tmp_path / "dump", steps=2)
    write_samples(dump, 0, [sample(0, 1.0)])
    (tmp_path / "link").symlink_to(dump / "events")
    before = {path: path.read_bytes() for path in dump.glob("*/*")}
    done = report("dump", "-o", output)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith(f"error: expected --output to be outside what is read of dump, found {output}")
    assert {path: path.read_bytes() for path in dump.glob("*/*")} == before
    assert report("dump", "-o", "dump/report.html").returncode == 0 and (dump / "report.html").is_file()


def test_a_link_to_the_page_stays_a_link(tmp_path, report):
    write_lines(tmp_path / "scan.jsonl", [record()])
    (tmp_path / "pages").mkdir()
    (tmp_path / "report.html").symlink_to("pages/today.html")
    for _ in range(2):
        assert report("scan.jsonl", "-o", "report.html").returncode == 0
        assert os.readlink(tmp_path / "report.html") == "pages/today.html"
        assert os.listdir(tmp_path / "pages") == ["today.html"]


@pytest.mark.parametrize("reader, returncode, said", [("gone", 0, ""), ("full", 2, "No space left on device")])
def test_the_page_is_written_where_the_terminal_takes_no_summary(tmp_path, reader, returncode, said):
    write_lines(tmp_path / "scan.jsonl", [record()])
    if reader == "full":
        stdout = os.open("/dev/full", os.O_WRONLY)
    else:
        nobody, stdout = os.pipe()
        os.close(nobody)
    command = [*COMMAND, "scan.jsonl", "-o", "report.html"]
    done = subprocess.run(command, cwd=tmp_path, stdout=stdout, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(stdout)
    assert done.returncode == returncode
    assert done.stderr == (f"error: expected to print the summary, found: {said}\n" if said else "")
    assert "The one task is sound" in (tmp_path / "report.html").read_text()


# --- training runs ----------------------------------------------------------------


@pytest.mark.parametrize(
    "line",
    [
        f"perf 0: {{'rollout/nemo_gym/exit_status/Submitted': {number}, 'rollout/raw_reward': 0.5}}"
        for number in ("1e300", "-5", "9" * 400)
    ],
)
def test_counts_that_cannot_be_drawn_are_left_out(tmp_path, report, line):
    (tmp_path / "train.log").write_text(f"{line}\n")
    done = report("train.log", "-o", "report.html")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("train.log: In 1 step the mean reward is 0.500.\n")


def test_a_run_alone_is_reported_with_its_own_verdict(tmp_path, report):
    done = report(write_run(tmp_path / "dump_details"), "-o", "report.html")
    assert (done.returncode, done.stderr) == (0, "")
    verdict = done.stdout.splitlines()[0].removeprefix("dump_details: ")
    page = Page((tmp_path / "report.html").read_text())
    assert verdict.startswith("In 60 steps the mean reward") and verdict in page.text
    for title in ("Reward", "Groups", "Exit statuses", "held_out", "dropped: zero_std_0.0"):
        assert title in page.text
    assert [tag for tag, _ in page.elements].count("svg") == 3 and page.data == {}
