"""What breaks under an episode in docker is told from what the agent did, and never becomes a reward."""

import asyncio
import json
import signal
import subprocess
import time

import pytest
from aiohttp import web
from local_stack.server import HOST

from .conftest import episode, start_container

_SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch.txt"
_SLOW_TESTS = 'printf \'import time\\nopen("/mark", "w")\\ntime.sleep(100)\\n\' > conftest.py; touch patch.txt'
_FILL = "head -c 4G /dev/zero > /full"


def _apply(task: dict) -> str:
    return f"git apply - <<'END_OF_PATCH'\n{task['patch']}\nEND_OF_PATCH\ngit diff > patch.txt"


async def _when_marked(engine, action) -> None:
    """Call ``action`` once a command in the only container has made the file /mark."""
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        for container in engine.docker("ps", "--quiet").split():
            listed = engine.docker("exec", container, "ls", "/", check=False)
            if "mark" in listed.split():
                action()
                return
        await asyncio.sleep(0.1)
    raise AssertionError("no command has made /mark")


def _restart(engine, number: int = signal.SIGKILL) -> None:
    engine.kill(number)
    engine.start()


# --- engine ---------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_an_engine_that_stopped_between_two_commands_is_no_verdict(breakable, docker_servers, tasks, number):
    def stop() -> str:
        breakable.kill(number)
        return "true"

    outcome = await episode(docker_servers, tasks[1], "true", stop)
    assert (outcome.exit_status, outcome.reward) == ("SandboxLost", None), outcome
    assert "engine" in outcome.detail
    outcome = await episode(docker_servers, tasks[1])
    assert (outcome.exit_status, outcome.reward) == ("SandboxUnavailable", None), outcome

    breakable.start()
    outcome = await episode(docker_servers, tasks[1])
    assert outcome.reward == 1.0, "NeMo Gym goes on with an engine that is back"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("turns", [["touch /mark; sleep 100"], [_SLOW_TESTS, _SUBMIT]], ids=["command", "tests"])
async def test_an_engine_restarted_under_a_command_is_no_verdict(breakable, docker_servers, tasks, turns, number):
    restart = asyncio.create_task(_when_marked(breakable, lambda: _restart(breakable, number)))
    outcome = await episode(docker_servers, tasks[1], *turns)
    await restart
    assert (outcome.exit_status, outcome.reward) == ("SandboxLost", None), outcome


async def test_a_container_removed_from_outside_is_no_verdict(breakable, docker_servers, tasks):
    def remove() -> None:
        breakable.docker("rm", "--force", *breakable.docker("ps", "--quiet").split())

    removal = asyncio.create_task(_when_marked(breakable, remove))
    outcome = await episode(docker_servers, tasks[1], "touch /mark; sleep 100")
    await removal
    assert (outcome.exit_status, outcome.reward) == ("SandboxLost", None), outcome


async def test_what_looks_like_a_stopped_engine_is_a_verdict(docker_servers, tasks):
    lines = [
        "Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
        "Error response from daemon: No such container: nemo-gym-1",
        "write error: No space left on device",
    ]
    pretence = "; ".join(f"echo '{line}' >&2" for line in lines) + "; exit 125"
    outcome = await episode(docker_servers, tasks[1], pretence)
    assert (outcome.exit_status, outcome.reward) == ("LimitsExceeded", 0.0), outcome
    outcome = await episode(docker_servers, tasks[1], pretence, "kill -9 $$", _apply(tasks[1]), _SUBMIT)
    assert (outcome.exit_status, outcome.reward) == ("Submitted", 1.0), outcome


# --- container --------------------------------------------------------------------


@pytest.mark.parametrize(
    "turns",
    [
        ["kill 1; sleep 5", "true"],
        ["(sleep 1; kill 1) > /dev/null 2>&1 &", "sleep 5"],
        ["printf 'import os\\nos.kill(1, 15)\\n' > conftest.py; touch patch.txt", _SUBMIT],
    ],
    ids=["command", "background", "tests"],
)
async def test_a_container_that_the_agent_ended_is_a_zero(docker_servers, tasks, turns):
    outcome = await episode(docker_servers, tasks[1], *turns)
    assert (outcome.exit_status, outcome.reward) == ("SandboxFailed", 0.0), outcome


async def test_a_container_that_ends_before_its_first_command_is_no_verdict(docker_servers, tasks):
    # An image without `sleep`, which is to keep its container alive.
    archive = "tar -chC / bin/sh $(ldd /bin/sh | grep -o '/[^ ]*')"
    subprocess.run(f"{archive} | docker import - no-sleep", shell=True, check=True, capture_output=True)
    row = {**tasks[1], "image_name": "no-sleep"}
    for outcome in [await episode(docker_servers, row), await episode(docker_servers, row, "true")]:
        assert (outcome.exit_status, outcome.reward) == ("SandboxUnavailable", None), outcome


async def test_the_processes_of_a_container_are_bounded(docker_servers, tasks):
    start = [
        "import subprocess",
        "started = []",
        "try:",
        "    while len(started) < 2000: started.append(subprocess.Popen(['sleep', '600']))",
        "finally:",
        "    for one in started: one.kill()",
    ]
    turns = ["python - <<'END' || touch /bounded", *start, "END"]
    outcome = await episode(
        docker_servers, tasks[1], "\n".join(turns), f"test -e /bounded && {_apply(tasks[1])}", _SUBMIT
    )
    assert (outcome.exit_status, outcome.reward) == ("Submitted", 1.0), outcome


# --- disk -------------------------------------------------------------------------


async def test_a_disk_filled_by_another_container_is_no_verdict(breakable, docker_servers, tasks):
    other = start_container(breakable, tasks[0]["image_name"])

    def fill() -> str:
        breakable.docker("exec", other, "sh", "-c", _FILL, check=False)
        return "head -c 1M /dev/zero > new"

    outcome = await episode(docker_servers, tasks[1], "true", fill)
    assert (outcome.exit_status, outcome.reward) == ("SandboxLost", None), outcome
    assert "disk" in outcome.detail
    outcome = await episode(docker_servers, tasks[1])
    assert (outcome.exit_status, outcome.reward) == ("SandboxUnavailable", None), outcome

    breakable.docker("rm", "--force", other)
    assert (await episode(docker_servers, tasks[1])).reward == 1.0


async def test_a_disk_that_fills_under_the_tests_is_no_verdict(breakable, docker_servers, tasks):
    tests = 'import shutil\\nshutil.copyfileobj(open("/dev/zero", "rb"), open("/full", "wb"), 1 << 20)\\n'
    outcome = await episode(docker_servers, tasks[1], f"printf '{tests}' > conftest.py; touch patch.txt", _SUBMIT)
    assert (outcome.exit_status, outcome.reward) == ("SandboxLost", None), outcome


async def test_a_full_place_of_the_containers_own_is_a_verdict(docker_servers, tasks):
    fill = "head -c 1G /dev/zero > /dev/shm/full"
    outcome = await episode(docker_servers, tasks[1], fill, _apply(tasks[1]), _SUBMIT)
    assert (outcome.exit_status, outcome.reward) == ("Submitted", 1.0), outcome


# --- registry ---------------------------------------------------------------------


async def test_a_registrys_pull_limit_is_no_verdict(docker_servers, tasks):
    asked = []

    async def greet(request: web.Request) -> web.Response:
        return web.json_response({})

    async def refuse(request: web.Request) -> web.Response:
        asked.append(request.path)
        error = {"code": "TOOMANYREQUESTS", "message": "You have reached your pull rate limit."}
        return web.json_response({"errors": [error]}, status=429)

    app = web.Application()
    app.router.add_get("/v2/", greet)
    app.router.add_get("/v2/{rest:.+}", refuse)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, HOST, 0).start()
        row = {**tasks[1], "image_name": f"{HOST}:{runner.addresses[0][1]}/swebench/limited:latest"}
        outcomes = [await episode(docker_servers, row), await episode(docker_servers, row, "true")]
    finally:
        await runner.cleanup()
    assert asked
    for outcome in outcomes:
        assert (outcome.exit_status, outcome.reward) == ("SandboxUnavailable", None), outcome
        assert "toomanyrequests" in json.dumps(outcome.eval_report).lower()
