"""However a run ends, nothing of it is left: no process, no port, no folder."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from local_stack.processes import RUN_VARIABLE, clear_dead_runs, locked
from local_stack.server import HOST, Ports, gym_environment

from .conftest import EXAMPLE_DIR

_KEEPER = EXAMPLE_DIR / "local_stack" / "keeper.py"


def processes_with(mark: str) -> list[int]:
    """Ids of the live processes whose environment holds a text."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def wait_until(condition, *, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.1)


@pytest.fixture
def mark(command_environment) -> str:
    """A text in the environment of every process that a test starts."""
    command_environment["TEST_MARK"] = f"mark-{os.getpid()}-{time.monotonic_ns()}"
    return command_environment["TEST_MARK"]


def start_run(command_environment, *command: str, port: int | None = None) -> subprocess.Popen:
    """Start ``python -m local_stack run`` with a command."""
    options = [] if port is None else ["--port", str(port)]
    return subprocess.Popen(
        [sys.executable, "-m", "local_stack", "run", *options, "--", *command],
        env=command_environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_run_ended_while_it_starts_leaves_nothing(paths, command_environment, mark, how):
    process = start_run(command_environment, "true")
    wait_until(lambda: len(processes_with(mark)) > 6, timeout_s=60)
    process.send_signal(how)
    process.wait(timeout=30)
    wait_until(lambda: not processes_with(mark), timeout_s=20)
    runs_before = {run.name for run in paths.runs.iterdir()}
    clear_dead_runs(paths.runs)
    assert not any(str(process.pid) in run.name for run in paths.runs.iterdir()), runs_before


def test_two_runs_at_once_and_a_stopped_one(paths, command_environment, mark, tmp_path):
    show = "import os, time; open({!r}, 'w').write(os.environ['NEMO_GYM_URL']); time.sleep({})"
    files = [tmp_path / "first", tmp_path / "second"]
    endless = start_run(command_environment, sys.executable, "-c", show.format(str(files[0]), 600))
    short = start_run(
        command_environment, sys.executable, "-c", show.format(str(files[1]), 2) + "; raise SystemExit(7)"
    )
    try:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files), timeout_s=200)
        assert files[0].read_text() != files[1].read_text()
        assert short.wait(timeout=60) == 7
        port = int(files[0].read_text().rpartition(":")[2])
        with socket.create_connection((HOST, port), timeout=5):
            pass
        os.killpg(endless.pid, signal.SIGINT)
        assert endless.wait(timeout=60) == 130
        wait_until(lambda: not processes_with(mark), timeout_s=20)
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, port), timeout=5)
    finally:
        for process in (endless, short):
            process.kill()


def test_a_taken_port_is_named_at_once(paths, command_environment):
    with socket.socket() as taken:
        taken.bind((HOST, 0))
        taken.listen()
        port = taken.getsockname()[1]
        first = port - 2 if port > 3 else port
        started = time.monotonic()
        process = start_run(command_environment, "true", port=first)
        output, _ = process.communicate(timeout=60)
    assert process.returncode == 2
    assert f"port {port}" in output and "PORT=" in output and "Traceback" not in output
    assert time.monotonic() - started < 15


def test_a_command_that_cannot_start_is_named(paths, command_environment, mark):
    process = start_run(command_environment, "/no/such/command")
    output, _ = process.communicate(timeout=20)
    assert process.returncode == 2 and "/no/such/command cannot be started" in output
    assert not processes_with(mark)


@pytest.mark.parametrize("how", ["parent hangs up", "keeper is terminated"])
def test_keeper_ends_daemons_of_its_command(tmp_path, command_environment, mark, how):
    daemon = "(setsid sh -c 'trap \"\" TERM INT HUP; (setsid sleep 300 &); sleep 300' &) ; sleep 300"
    keeper = subprocess.Popen(
        [sys.executable, str(_KEEPER), "sh", "-c", daemon],
        stdin=subprocess.PIPE,
        env=command_environment,
    )
    wait_until(lambda: len(processes_with(mark)) >= 5, timeout_s=20)
    keeper.stdin.close() if how == "parent hangs up" else keeper.terminate()
    assert keeper.wait(timeout=20) == 143
    assert not processes_with(mark)


def test_what_a_killed_keeper_left_is_cleared(tmp_path, command_environment, mark):
    runs = tmp_path / "runs"
    run = runs / "1"
    ray = tmp_path / "ray"
    run.mkdir(parents=True)
    ray.mkdir()
    (run / "ray").symlink_to(ray)
    (runs / "no-run").touch()
    command_environment[RUN_VARIABLE] = str(run)
    retitled = f"env -i setsid sleep 300 >{ray}/log & echo $! >{ray}/pid"  # as Ray's: its environment is gone
    with locked(run / "lock") as lock:
        keeper = subprocess.Popen(
            [sys.executable, str(_KEEPER), "sh", "-c", f"({retitled}); (setsid sleep 300 &); sleep 300"],
            stdin=subprocess.PIPE,
            env=command_environment,
            pass_fds=[lock.fileno()],
        )
    wait_until(lambda: len(processes_with(mark)) >= 3, timeout_s=20)
    assert clear_dead_runs(runs) == [], "a live run was cleared"
    keeper.kill()
    keeper.wait()
    left, unmarked = processes_with(mark), Path("/proc", (ray / "pid").read_text().strip())
    assert unmarked.exists()
    others = {key: value for key, value in command_environment.items() if value != mark and key != RUN_VARIABLE}
    command = [sys.executable, "-m", "local_stack", "clear"]
    environment = {**others, "LOCAL_STACK_DIR": str(tmp_path)}
    said = subprocess.run(command, env=environment, check=True, stderr=subprocess.PIPE, text=True).stderr
    assert len(left) >= 2 and f"ended {len(left) + 1} processes" in said
    assert not processes_with(mark)
    wait_until(lambda: not unmarked.exists(), timeout_s=20)  # whoever adopted it has to take note first
    assert not run.exists() and not ray.exists()


def test_free_ports_are_four():
    assert len(set(vars(Ports.free()).values())) == 4


def test_processes_of_nemo_gym_compile_their_modules_once(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in gym_environment(run=tmp_path, concurrency=2)


def test_clear_without_anything_to_clear(tmp_path, command_environment):
    def clear(folder: Path) -> subprocess.CompletedProcess[str]:
        environment = {**command_environment, "LOCAL_STACK_DIR": str(folder)}
        command = [sys.executable, "-m", "local_stack", "clear"]
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30)

    done = clear(tmp_path / "none")
    assert (done.returncode, done.stderr) == (0, "") and not (tmp_path / "none").exists()
    (tmp_path / "runs").touch()
    done = clear(tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
