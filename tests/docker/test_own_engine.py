"""An own engine leaves nothing behind, and containers of dead runs are found again."""

import contextlib
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
# One program of this machine with its libraries is an image.
_RUN = """
tar -chC / bin/sleep $(ldd /bin/sleep | grep -o '/[^ ]*') | docker import - sleeper >&2 &&
docker run --detach --pids-limit=64 --env TEST_MARK sleeper sleep 600 >&2 && echo $DOCKER_HOST && exec sleep 600
"""


def _processes_with(mark: str) -> dict[int, str]:
    """Names of the processes with that in their environment, by id."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found[int(folder.name)] = (folder / "comm").read_text().strip()
    return found


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_an_engine_ends_with_what_started_it(command_environment, how):
    mark = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    environment = {**command_environment, "TEST_MARK": mark}
    command = [sys.executable, str(_TOOL), "sh", "-c", _RUN]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as tool:
        try:
            folder = Path(tool.stdout.readline().strip().removeprefix("unix://")).parent
            assert (folder / "data").is_dir()
            deadline = time.monotonic() + 30  # the command is a shell before it sleeps
            while (names := list(_processes_with(mark).values())).count("sleep") < 3:
                assert (
                    time.monotonic() < deadline
                ), f"expected those of the namespaces, the command, the container: {names}"
                time.sleep(0.1)
            assert {"dockerd", "containerd", "docker-init"} <= set(names), names
            tool.send_signal(how)
            assert tool.wait(timeout=30) == (143 if how == signal.SIGTERM else -signal.SIGKILL)
        finally:
            tool.kill()
    deadline = time.monotonic() + 30
    while left := _processes_with(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    assert folder.name not in Path("/proc/self/mounts").read_text()

    if how == signal.SIGKILL:
        subprocess.run([sys.executable, str(_TOOL), "true"], env=environment, check=True)
    assert not folder.exists()
    assert list(Path("/sys/fs/cgroup").glob(f"**/{folder.name}")) == []


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
