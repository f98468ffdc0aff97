"""The same episodes in both sandboxes have the same verdicts, test by test."""

import asyncio
import json

from local_stack.scripted_policy import make_app, role_url, serving
from nemogym_agent_function import run_episode

from .conftest import TIMEOUT_S, episode

_AT_A_TIME = 2  # each needs a worker of its own, which takes a CPU 10 s to start
_ROLES = {
    "solve": ("Submitted", 1.0),
    "wrong": ("Submitted", 0.0),
    "never-submit": ("LimitsExceeded", 0.0),
    "crash": ("PolicyEndpointError", None),
}


async def _gather(episodes: list) -> list:
    places = asyncio.Semaphore(_AT_A_TIME)

    async def in_place(one):
        async with places:
            return await one

    return await asyncio.gather(*map(in_place, episodes))


def _tests(outcome, task: dict) -> tuple[list[str], list[str], list[str]]:
    """FAIL_TO_PASS tests that passed, those that failed, PASS_TO_PASS tests that passed."""
    status = outcome.eval_report["eval_report"][task["instance_id"]]["tests_status"]
    kept = status["PASS_TO_PASS"]
    assert kept["failure"] == [], outcome
    return status["FAIL_TO_PASS"]["success"], status["FAIL_TO_PASS"]["failure"], kept["success"]


def _one_of_each_repository(tasks: list[dict]) -> list[dict]:
    return list({task["repo"]: task for task in tasks}.values())


async def _check_patches(servers, tasks: list[dict]) -> None:
    """Every single test of each task passes or fails as its patch, gold or empty, has it."""
    outcomes = await _gather([episode(servers, task) for task in tasks])
    for task, outcome in zip(tasks, outcomes, strict=True):
        expected = json.loads(task["FAIL_TO_PASS"])
        passed, failed = (expected, []) if task["patch"] else ([], expected)
        assert (outcome.exit_status, outcome.reward) == ("Submitted", 1.0 if task["patch"] else 0.0), outcome
        assert _tests(outcome, task) == (passed, failed, json.loads(task["PASS_TO_PASS"]))


async def test_a_patch_has_the_verdict_of_every_single_test(servers, tasks):
    some = _one_of_each_repository(tasks)
    await _check_patches(servers, some + [{**task, "patch": ""} for task in some])


async def test_the_other_tasks_are_solved_in_docker_too(docker_servers, tasks):
    some = _one_of_each_repository(tasks)
    await _check_patches(docker_servers, [task for task in tasks if task not in some])


async def test_a_policy_has_its_verdict(servers, tasks):
    task = tasks[0]
    async with serving(make_app(tasks)) as url:
        outcomes = await _gather(
            [
                run_episode(
                    task,
                    request_kwargs={},
                    server=servers.policy_url,
                    timeout_s=TIMEOUT_S,
                    policy_base_url=role_url(url, role),
                )
                for role in _ROLES
            ]
        )
    by_role = dict(zip(_ROLES, outcomes, strict=True))
    assert {role: (outcome.exit_status, outcome.reward) for role, outcome in by_role.items()} == _ROLES
    assert by_role["solve"].eval_report["model_patch"].strip() == task["patch"].strip()


async def test_an_image_that_is_not_there_is_no_verdict(servers, tasks):
    row = {**tasks[0], "image_name": "docker.io/swebench/sweb.eval.x86_64.missing:latest"}
    for outcome in await _gather([episode(servers, row), episode(servers, row, "true")]):
        assert (outcome.exit_status, outcome.reward) == ("SandboxUnavailable", None), outcome


async def test_a_sandbox_that_the_agent_ends_is_a_zero(servers, tasks):
    # A container ends with its first process; a bubblewrap sandbox's cannot be reached, and it goes on to its verdict.
    outcome = await episode(servers, tasks[0], "kill 1; kill -9 -1", "true")
    assert outcome.exit_status in ("SandboxFailed", "LimitsExceeded") and outcome.reward == 0.0, outcome
