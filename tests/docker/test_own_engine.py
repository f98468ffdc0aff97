"""An own engine leaves nothing behind, and containers of dead runs are found again."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from local_stack.docker_engine import remove_containers, run_arguments
from local_stack.processes import locked

from .conftest import REPOSITORY, start_container

_TOOL = REPOSITORY / "tools" / "docker_engine.py"
_MAKE_IMAGES = f"{sys.executable} -m local_stack setup --sandbox docker"


def _processes_with(mark: str) -> list[int]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def _engine_folders() -> set[str]:
    return {folder.name for folder in Path("/tmp").glob("own-docker-*")}


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_ends_with_what_started_it(command_environment, tasks, how):
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    before = _engine_folders()
    mounts = Path("/proc/self/mounts").read_text()
    image = tasks[0]["image_name"]
    run = f"docker run --rm --pids-limit=64 --env TEST_MARK={mark} {image} sh -c 'echo running; sleep 600'"
    command = [sys.executable, str(_TOOL), "sh", "-c", f"{_MAKE_IMAGES} >&2 && exec {run}"]
    environment = {**command_environment, "TEST_MARK": mark}
    del environment["DOCKER_HOST"]
    tool = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert tool.stdout.readline() == "running\n"
    assert len(_processes_with(mark)) >= 5, "tool, namespaces, engine, client, container"

    tool.send_signal(how)
    assert tool.wait(timeout=30) == (143 if how == signal.SIGTERM else -signal.SIGKILL)
    deadline = time.monotonic() + 30
    while left := _processes_with(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert Path("/proc/self/mounts").read_text() == mounts

    subprocess.run([sys.executable, str(_TOOL), "true"], env=environment, check=True)
    assert _engine_folders() == before
    assert not [group for group in Path("/sys/fs/cgroup").glob("*/own-docker-*") if group.name not in before]


def test_the_commands_own_status_is_the_tools(command_environment):
    done = subprocess.run([sys.executable, str(_TOOL), "sh", "-c", "exit 7"], env=command_environment)
    assert done.returncode == 7


def test_only_containers_of_dead_runs_are_removed(breakable, tasks, tmp_path):
    runs = tmp_path / "runs"
    names = {}
    for name in ("alive", "dead"):
        (runs / name).mkdir(parents=True)
        names[name] = start_container(breakable, tasks[0]["image_name"], *run_arguments(runs / name))
    others = start_container(breakable, tasks[0]["image_name"])

    with locked(runs / "alive" / "lock"):
        assert [name[:12] for name in remove_containers(runs)] == [names["dead"][:12]]
        assert remove_containers(tmp_path / "elsewhere") == []
    left = breakable.docker("ps", "--quiet", "--no-trunc").split()
    assert set(left) == {names["alive"], others}
