"""Which images a data file needs, and what a failed pull means."""

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import prefetch_images
import pytest
from prefetch_images import Failure, PullLimit, SetUpError, classify, read_images, short_name


@pytest.fixture
def rows(tmp_path):
    def write(*rows) -> str:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
        return path

    return write


def test_images_are_those_that_the_connector_asks_for_each_once(rows):
    path = rows(
        {"prompt": "", "metadata": {"instance_id": "a__b-1", "subset": "verified"}},
        {"instance_id": "a__b-2"},
        "",
        {"instance_id": "a__b-3", "image_name": "registry:5000/own:1"},
        {"prompt": "", "metadata": {"instance_id": "A__b-1", "subset": "verified"}},
    )
    assert read_images(path) == [
        "docker.io/swebench/sweb.eval.x86_64.a_1776_b-1:latest",
        "docker.io/xingyaoww/sweb.eval.x86_64.a_s_b-2:latest",
        "registry:5000/own:1",
    ]


@pytest.mark.parametrize(
    "content, message",
    [
        ([], "at least one row"),
        (["{"], "line 1"),
        ([{"instance_id": "a-1"}, []], "line 2"),
        ([{"prompt": "x"}], "line 1: expected a SWE-bench row"),
        ([{"instance_id": "../x"}], "line 1"),
        (["3"], "line 1"),
        ([{"instance_id": "a-1", "image_name": "--all-tags"}], "line 1: expected image_name to be"),
        ([{"instance_id": "a-1", "image_name": "\ud800"}], "line 1: expected image_name to be"),
    ],
)
def test_a_file_that_names_no_tasks_is_refused(rows, content, message):
    with pytest.raises(SetUpError, match=message):
        read_images(rows(*content))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(SetUpError, match="No such file"):
        read_images(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    "image, name",
    [
        ("docker.io/swebench/sweb.eval.x86_64.a:latest", "swebench/sweb.eval.x86_64.a:latest"),
        ("docker.io/library/debian", "debian:latest"),
        ("127.0.0.1:5000/a/b", "127.0.0.1:5000/a/b:latest"),
        ("127.0.0.1:5000/a/b:1", "127.0.0.1:5000/a/b:1"),
    ],
)
def test_names_are_as_docker_lists_them(image, name):
    assert short_name(image) == name


@pytest.mark.parametrize(
    "error, failure",
    [
        ("toomanyrequests: You have reached your unauthenticated pull rate limit.", Failure.PULL_LIMIT),
        (
            "error pulling image configuration: received unexpected HTTP status: 429 Too Many Requests",
            Failure.PULL_LIMIT,
        ),
        ("failed to register layer: write /usr/lib/x: no space left on device", Failure.FULL_DISK),
        ("manifest for swebench/x:latest not found: manifest unknown", Failure.NO_IMAGE),
        (
            "pull access denied for swebench/x, repository does not exist or may require 'docker login'",
            Failure.NO_IMAGE,
        ),
        ("no matching manifest for linux/arm64/v8 in the manifest list entries", Failure.NO_IMAGE),
        ("net/http: TLS handshake timeout", Failure.OTHER),
        ("received unexpected HTTP status: 503 Service Unavailable", Failure.OTHER),
        ("", Failure.OTHER),
    ],
)
def test_a_failed_pull_is_told_by_its_message(error, failure):
    assert classify(error) is failure


def test_pauses_double_and_start_again_once_a_pull_goes_through(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr(prefetch_images.time, "monotonic", lambda: now[0])
    limit = PullLimit(first_s=60, longest_s=200, patience_s=1000)
    assert limit.is_met() == 60
    assert limit.is_met() == 0.0, "the others join the pause"
    pauses = []
    for _ in range(3):
        now[0] += 201
        pauses.append(limit.is_met())
    assert pauses == [120, 200, 200]
    now[0] += 201
    limit.is_over()
    assert limit.is_met() == 60
    now[0] += 1001
    assert limit.is_met() is None


async def test_nobody_pulls_during_a_pause():
    limit = PullLimit(first_s=0.2)
    limit.is_met()
    loop = asyncio.get_running_loop()
    started = loop.time()
    await asyncio.gather(limit.wait(), limit.wait())
    assert 0.19 <= loop.time() - started < 2


_DOCKER = """#!/bin/sh
echo "$@" >> {log}
case "$1" in info) echo "{architecture} /nowhere" ;; esac
"""


@pytest.mark.parametrize("architecture, options", [("x86_64", ""), ("aarch64", "--platform linux/amd64 ")])
def test_an_engine_of_another_kind_is_warned_of_and_asked_for_x86_64_images(rows, tmp_path, architecture, options):
    (tmp_path / "docker").write_text(_DOCKER.format(log=tmp_path / "log", architecture=architecture))
    (tmp_path / "docker").chmod(0o755)
    command = [
        sys.executable,
        prefetch_images.__file__,
        "--input",
        rows({"instance_id": "a__b-1", "image_name": "own:1"}),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": str(Path(prefetch_images.__file__).parent),
        "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert ("the engine is aarch64: it has to emulate them" in done.stderr) == (architecture == "aarch64")
    assert "the engine's disk is not on this machine" in done.stderr
    assert (tmp_path / "log").read_text().splitlines()[-1] == f"pull --quiet {options}-- own:1"
