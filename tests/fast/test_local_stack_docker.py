"""SANDBOX=docker without an engine: what NeMo Gym is told, and how a missing engine is refused."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

_EXAMPLE = Path(__file__).parents[2] / "examples" / "experimental" / "nemo-gym"


@pytest.fixture
def stack(monkeypatch):
    monkeypatch.syspath_prepend(str(_EXAMPLE))
    return lambda name: importlib.import_module(f"local_stack.{name}")


def _setup(tmp_path: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(_EXAMPLE), "LOCAL_STACK_DIR": str(tmp_path / "stack"), **variables}
    command = [sys.executable, "-m", "local_stack", "setup"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.fixture
def docker(tmp_path):
    """A program ``docker`` first on PATH that fails with a message."""

    def make(message: str) -> str:
        program = tmp_path / "bin" / "docker"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\necho '{message}' >&2\nexit 1\n")
        program.chmod(0o755)
        return f"{program.parent}{os.pathsep}{os.environ['PATH']}"

    return make


@pytest.mark.parametrize(
    "message, advice",
    [
        (
            "permission denied while trying to connect to the Docker daemon socket",
            "socket. Let your user use it, `sudo usermod",
        ),
        (
            "Cannot connect to the Docker daemon at unix:///x. Is the docker daemon running?",
            "running? Start it, `sudo systemctl start",
        ),
        ("something else", "something else"),
    ],
)
def test_an_engine_that_does_not_answer_is_refused_at_once(tmp_path, docker, message, advice):
    done = _setup(tmp_path, SANDBOX="docker", PATH=docker(message))
    assert done.returncode == 2
    assert (
        done.stderr.startswith("error: no docker engine for SANDBOX=docker: ") and len(done.stderr.splitlines()) == 1
    )
    assert message in done.stderr and advice in done.stderr
    assert not (tmp_path / "stack" / "gym").exists(), "nothing was installed before"


def test_no_docker_at_all_is_refused(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("git", "uv"):
        (programs / name).symlink_to("/bin/true")
    done = _setup(tmp_path, SANDBOX="docker", PATH=str(programs))
    assert done.returncode == 2 and "there is no program `docker`" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("sandbox, file", [("docker", "golden-docker.jsonl"), ("bubblewrap", "golden.jsonl")])
def test_a_scan_has_one_sandboxs_results(sandbox, file):
    root = Path(__file__).resolve().parents[2]
    command = ["make", "--dry-run", "golden-scan", f"SANDBOX={sandbox}"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"--output outputs/{file}" in done.stdout


def test_another_sandbox_is_refused(tmp_path):
    done = _setup(tmp_path, SANDBOX="podman")
    assert done.returncode == 2 and "'podman'" in done.stderr and "bubblewrap" in done.stderr


@pytest.mark.parametrize(
    "machine, platform", [("x86_64", []), ("AMD64", []), ("aarch64", ["--platform", "linux/amd64"])]
)
def test_images_are_asked_for_as_x86_64_ones_elsewhere(stack, machine, platform):
    arguments = stack("docker_engine").run_arguments(Path("/runs/1"), machine=machine)
    assert arguments == ["--label", "miles-nemo-gym.run=/runs/1", *platform]


@pytest.mark.parametrize("sandbox", ["docker", "bubblewrap"])
def test_the_configuration_names_one_provider_with_bounds(stack, sandbox):
    server = stack("server")
    config = server.gym_config(
        ports=server.Ports(1, 2, 3, 4),
        options=server.Options(sandbox=server.Sandbox(sandbox)),
        images=Path("/images"),
        run=Path("/runs/1"),
    )
    agents = [config[name]["responses_api_agents"]["mini_swe_agent_2"] for name in config if "golden" in name]
    (provider,) = config["sandbox"]
    if sandbox == "docker":
        create = config["sandbox"][provider]["create"]
        assert provider == "guarded_docker" and create["pids_limit"] > 0
        assert create["extra_run_args"][:2] == ["--label", "miles-nemo-gym.run=/runs/1"]
        assert agents[0]["sandbox_spec"]["ttl_s"] > 0 and agents[0]["sandbox_spec"]["resources"]["memory_mib"] > 0
    else:
        assert config["sandbox"] == {"bubblewrap": {"image_root": "/images"}}


@pytest.mark.parametrize(
    "command, variables, said",
    [
        *(
            (["true"], {"DOCKER_ENGINE_MIB": size}, "DOCKER_ENGINE_MIB: expected MiB as a whole number from 1 to")
            for size in ("2 GB", "0", "99999999")
        ),
        (["no-such-program"], {}, "no-such-program cannot be started: no such program"),
    ],
)
def test_a_mistake_is_told_before_an_engine_of_ones_own_starts(command, variables, said):
    tool = Path(__file__).parents[2] / "tools" / "docker_engine.py"
    environment = {**os.environ, **variables}
    done = subprocess.run(
        [sys.executable, str(tool), *command], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {said}") and len(done.stderr.splitlines()) == 1
