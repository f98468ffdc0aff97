"""NeMo Gym killed and started again among the episodes of one run."""

import asyncio
import json
import os
import signal

import nemogym_agent_function
import pytest
from local_stack.scripted_policy import make_app, serving
from local_stack.server import Options, Ports, running_stack

_EPISODES = 32
_KILL_AFTER = 8


@pytest.fixture
def connector(monkeypatch):
    monkeypatch.setenv("NEMO_GYM_MAX_CONCURRENCY", "2")
    monkeypatch.setenv("NEMO_GYM_RUN_TIMEOUT", "300")
    return nemogym_agent_function


async def test_a_restart_costs_only_what_was_in_flight(paths, tasks, connector, monkeypatch):
    ports = Ports.free()
    monkeypatch.setenv("NEMO_GYM_URL", f"http://127.0.0.1:{ports.policy}")
    ended: list[dict] = []

    async with serving(make_app(tasks)) as url:

        async def episode(number: int) -> dict:
            role = "solve" if number % 2 else "wrong"
            row = dict(tasks[number % 3])
            result = await connector.run(base_url=f"{url}/{role}", prompt="", request_kwargs={}, metadata=row)
            ended.append(result)
            return result

        def start():
            context = running_stack(paths, ports=ports, options=Options(concurrency=2))
            return context, context.__enter__()

        context, stack = await asyncio.to_thread(start)
        episodes = [asyncio.create_task(episode(number)) for number in range(_EPISODES)]
        try:
            while len(ended) < _KILL_AFTER:
                await asyncio.sleep(0.1)
            os.killpg(stack.keeper.pid, signal.SIGKILL)
            await asyncio.to_thread(context.__exit__, None, None, None)
            context, _ = await asyncio.to_thread(start)
            results = await asyncio.wait_for(asyncio.gather(*episodes), timeout=300)
        finally:
            for task in episodes:
                task.cancel()
            await asyncio.to_thread(context.__exit__, None, None, None)

    lost = [result for result in results if "reward" not in result]
    assert {result["exit_status"] for result in lost} <= {"ServerUnreachable"}, json.dumps(lost, indent=1)
    assert len(lost) <= 2, "no more than were in flight"
    for number, result in enumerate(results):
        if "reward" in result:
            assert (result["exit_status"], result["reward"]) == ("Submitted", float(number % 2)), result
