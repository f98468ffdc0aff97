"""The report as its user makes it, all but the page: a process, its exit status, the terminal."""

import os
import signal
import subprocess
import time

import pytest
from file_writer import replacing
from row_reader import DataError

from .made_scans import record, write_lines
from .report_command import COMMAND, report_in, report_process

POLICY = {"kind": "policy", "policy": "m", "sampling": {"temperature": 1.0}}


@pytest.fixture
def report(monkeypatch, tmp_path):
    return report_in(tmp_path, monkeypatch)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["no.jsonl"], "expected to read no.jsonl, found: No such file or directory"),
        (["empty.jsonl"], "expected at least one ended episode in empty.jsonl, found none"),
        (["old.jsonl"], "old.jsonl line 1: expected an episode, found one without 'repo'"),
        (["good.jsonl", "other.jsonl"], "expected scans of the same rows, found two of a__b-1"),
        (["good.jsonl", "good.jsonl"], "expected every input once, found one twice"),
        (["good.jsonl", "-o", "good.jsonl"], "expected --output to be another file than the inputs, found good.jsonl"),
        (["good.jsonl", "-o", "."], "expected --output to be a file, found ., which is none"),
        (["good.jsonl", "--solve-rate", "2:1"], "expected --solve-rate to be two shares in order"),
        (["text.log"], "expected lines `perf <number>: {...}` with rollouts in text.log, found none"),
        (["."], "expected events/*.jsonl or rollout_data/*.pt of --dump-details with rollouts in ., found none"),
        (["n" * 300], f"expected to read {'n' * 300}, found: File name too long"),
        (["good.jsonl", "-o", "/dev/null"], "expected --output to be a file, found /dev/null, which is none"),
    ],
)
def test_what_is_wrong_is_said_and_nothing_is_written(tmp_path, report, arguments, said):
    write_lines(tmp_path / "good.jsonl", [record()])
    write_lines(tmp_path / "other.jsonl", [record(task="f" * 16, **POLICY)])
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "old.jsonl").write_text('{"instance_id": "a"}\n')
    (tmp_path / "text.log").write_text("nothing\n")
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    outputs = [] if "-o" in arguments else ["-o", "report.html"]
    done = report(*arguments, *outputs)
    assert done.returncode == 2 and done.stderr.startswith(f"error: {said}")
    assert len(done.stderr.splitlines()) == 1 and done.stdout == ""
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_options_that_make_no_sense_end_with_2(tmp_path, report):
    assert report().returncode == 2
    assert report("a.jsonl", "--nonsense").returncode == 2


def test_more_scans_than_colours_are_refused(tmp_path, report):
    paths = [write_lines(tmp_path / f"{number}.jsonl", [record()]) for number in range(9)]
    done = report(*paths)
    assert done.returncode == 2 and "expected at most 8 scans, found 9" in done.stderr


def test_files_of_one_name_are_told_apart_by_their_folders(tmp_path, report):
    for folder, reward in (("one", 0.0), ("two", 1.0)):
        (tmp_path / folder).mkdir()
        write_lines(tmp_path / folder / "policy.jsonl", [record(reward=reward, **POLICY)])
    done = report("one/policy.jsonl", "two/policy.jsonl")
    assert done.returncode == 0 and "one/policy.jsonl and two/policy.jsonl: The mean solve rate" in done.stdout


def test_without_the_packages_of_the_page_the_terminal_is_told_all_the_same(tmp_path, report):
    (tmp_path / "jinja2.py").write_text("raise ImportError(name='jinja2')\n")
    write_lines(tmp_path / "scan.jsonl", [record()])
    done = report_process("scan.jsonl", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("The one task is sound")
    done = report_process("scan.jsonl", "-o", "report.html", cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert done.returncode == 2 and done.stdout.startswith("The one task is sound")
    assert done.stderr.startswith("error: expected jinja2 and matplotlib for the page, found no jinja2: pip install")
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_only_a_file_is_replaced(tmp_path, make):
    make(tmp_path / "there")
    (tmp_path / "link").symlink_to("there")
    before = os.stat(tmp_path / "there")
    with pytest.raises(DataError, match="expected --output to be a file, found .*link, which is none"):
        with replacing(tmp_path / "link"):
            pytest.fail("opened")
    assert os.path.samestat(os.stat(tmp_path / "link"), before) and len(os.listdir(tmp_path)) == 2


def test_a_pipe_as_an_input_is_refused(tmp_path, report):
    os.mkfifo(tmp_path / "scan.jsonl")
    done = report("scan.jsonl")
    assert done.returncode == 2
    assert done.stderr.startswith("error: expected scan.jsonl to be a file or a folder, found neither")


def test_ctrl_c_ends_with_130(tmp_path, report):
    fifo = tmp_path / "dump/events/a.jsonl"
    fifo.parent.mkdir(parents=True)
    os.mkfifo(fifo)
    process = subprocess.Popen([*COMMAND, "dump"], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    with open(fifo, "w"):  # opens as soon as the report reads
        time.sleep(0.5)  # reading, not only about to: a signal that comes between the two is not seen
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 130 and said == "interrupted\n"
