"""A real NeMo Gym on this machine: how long it takes to start, what an episode costs, and where the time goes."""

import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web
from local_stack.paths import Paths
from local_stack.processes import RUN_VARIABLE
from local_stack.scripted_policy import load_tasks, make_app, role_url, serving
from local_stack.server import Options, Stack, running_stack
from nemogym_agent_function import run_episode
from nemogym_contract import Outcome

from .report import Claim, Part

CONCURRENCIES = (1, 4, 8)

_WARM_TIMES = 5
_AT_LEAST = 12
_TIMEOUT_S = 300.0
_GRADING = Path(__file__).with_name("sandbox_grading.py")
# What an episode's worker imports before it can do anything.
_WORKER_IMPORTS = "import responses_api_agents.mini_swe_agent_2.app, minisweagent.agents.default, swebench"


def run(rounds: int) -> Part:
    """Start the stack, run single episodes cold and warm, then several at a time, and take the warm ones apart."""
    paths = Paths.from_environment()
    tasks = load_tasks(paths.tasks)
    start = time.monotonic()
    with running_stack(paths, options=Options(concurrency=max(CONCURRENCIES))) as stack:
        started = time.monotonic() - start
        idle_mib = _memory_mib(stack.run)
        found = asyncio.run(_measure(stack, paths, tasks, rounds))
        worker_mib = max(_mib(process) for process in _processes_of(stack.run) if _is_worker(process))
    rows = [
        _row("start of NeMo Gym until it is ready", "s", started),
        _row("its memory, idle", "MiB", idle_mib),
        _row("memory of a worker (the largest), of which each open episode has one", "MiB", worker_mib),
        *_worker_start(paths),
        *found.rows,
    ]
    return Part("stack", f"NeMo Gym on this machine, task {tasks[0]['instance_id']}", rows, found.claims)


@dataclass
class _Found:
    rows: list[dict] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)


async def _measure(stack: Stack, paths: Paths, tasks: list[dict], rounds: int) -> _Found:
    found, calls = _Found(), _Calls()
    async with serving(calls.watched(make_app(tasks))) as url:

        async def golden() -> Outcome:
            return await run_episode(
                tasks[0], request_kwargs={}, server=stack.golden_url, timeout_s=_TIMEOUT_S, golden=True
            )

        async def policy() -> Outcome:
            return await run_episode(
                tasks[0],
                request_kwargs={},
                server=stack.policy_url,
                timeout_s=_TIMEOUT_S,
                policy_base_url=role_url(url, "solve"),
                policy_api_key="unused",
            )

        cold = await _seconds(golden)
        warm, gradings = [], []
        for _ in range(2 * rounds):  # in turn: a machine is not equally busy all the time
            warm += [await _seconds(golden) for _ in range(_WARM_TIMES)]
            gradings += [_bare_grading(paths, tasks[0]) for _ in range(_WARM_TIMES)]
        parts = {step: statistics.median(grading[step] for grading in gradings) for step in gradings[0]}
        found.rows += _golden_rows(cold, statistics.median(warm), parts)
        claim = "warm golden episode, of its own tests run bare in the same sandbox"
        found.claims.append(Claim(claim, statistics.median(warm) / parts["tests"], 1.5))

        await _seconds(policy)
        found.rows += _policy_rows([await calls.phases(policy) for _ in range(rounds * _WARM_TIMES)])
        for name, episode in (("golden", golden), ("policy", policy)):
            for concurrency in CONCURRENCIES:
                found.rows += await _throughput(name, episode, concurrency)
    return found


async def _throughput(name: str, episode: Callable, concurrency: int) -> list[dict]:
    places = asyncio.Semaphore(concurrency)
    count = max(_AT_LEAST, 3 * concurrency)

    async def one() -> None:
        async with places:
            await _seconds(episode)

    await asyncio.gather(*(one() for _ in range(concurrency)))  # starts the workers
    cpu, start = _machines_cpu_s(), time.monotonic()
    await asyncio.gather(*(one() for _ in range(count)))
    wall, cpu = time.monotonic() - start, _machines_cpu_s() - cpu
    return [
        _row(f"{name} episodes a minute, {concurrency} at a time", "1/min", 60 * count / wall),
        _row(f"CPU of the machine for a {name} episode, {concurrency} at a time", "s", cpu / count),
    ]


async def _seconds(episode: Callable[[], Awaitable[Outcome]]) -> float:
    start = time.monotonic()
    outcome = await episode()
    if outcome.reward != 1.0:
        raise RuntimeError(f"expected an episode with reward 1.0, found {outcome.exit_status}: {outcome.detail}")
    return time.monotonic() - start


def _golden_rows(cold: float, warm: float, parts: dict[str, float]) -> list[dict]:
    steps = {
        "tests": parts["tests"],
        "rest of the script": parts["script"] - parts["tests"],
        "sandbox": parts["sandbox"],
    }
    own = warm - sum(steps.values()) - parts["patch"] - parts["report"]
    return [
        _row("first golden episode", "s", cold),
        _row("  of it the start of its worker", "s", cold - warm),
        _row("warm golden episode", "s", warm),
        _row("  its tests", "s", steps["tests"]),
        _row("  the rest of swebench's script", "s", steps["rest of the script"]),
        _row("  sandbox: namespaces and a copy of the repository", "s", steps["sandbox"]),
        _row("  gold patch and report", "s", parts["patch"] + parts["report"]),
        _row("  NeMo Gym's own share: HTTP, Ray, configuration", "s", own),
    ]


def _policy_rows(phases: list[dict[str, float]]) -> list[dict]:
    return [_row(name, "s", statistics.median(each[name] for each in phases)) for name in phases[0]]


def _bare_grading(paths: Paths, task: dict) -> dict[str, float]:
    """Seconds of each step of ``sandbox_grading``."""
    request = {"image_root": str(paths.images), "image": task["image_name"], "task": task}
    done = subprocess.run(
        [str(paths.gym_python), str(_GRADING)], input=json.dumps(request), capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{_GRADING.name} ended with {done.returncode}: {done.stderr[-2000:]}")
    return json.loads(done.stdout)


def _worker_start(paths: Paths) -> list[dict]:
    """CPU of a worker's imports with the bytecode of its modules kept, and without."""
    settings = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "MSWEA_SILENT_STARTUP": "1"}
    inherited = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}

    def cpu_s(*options: str) -> float:
        before = os.times()
        command = [str(paths.gym_python), *options, "-c", _WORKER_IMPORTS]
        subprocess.run(command, env={**inherited, **settings}, check=True, capture_output=True)
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    cpu_s()  # keeps the bytecode
    return [
        _row("CPU of a worker's imports, bytecode kept", "s", cpu_s()),
        _row("CPU of a worker's imports, bytecode made anew", "s", cpu_s("-B", "-X", "pycache_prefix=/nonexistent")),
    ]


def _row(what: str, unit: str, value: float) -> dict:
    print(f"{what.strip()}: {value:.3g} {unit}", file=sys.stderr, flush=True)
    return {"what": what, "unit": unit, "value": value}


# --- the policy's endpoint -----------------------------------------------------------


class _Calls:
    """When the agent's model calls came and were answered."""

    def __init__(self) -> None:
        self._calls: list[tuple[float, float]] = []

    def watched(self, app: web.Application) -> web.Application:
        @web.middleware
        async def watch(request: web.Request, handler: Callable) -> web.StreamResponse:
            came = time.monotonic()
            try:
                return await handler(request)
            finally:
                self._calls.append((came, time.monotonic()))

        app.middlewares.append(watch)
        return app

    async def phases(self, episode: Callable[[], Awaitable[Outcome]]) -> dict[str, float]:
        """Seconds of one episode by phase."""
        self._calls.clear()
        start = time.monotonic()
        whole = await _seconds(episode)
        model = sum(answered - came for came, answered in self._calls)
        first, last = self._calls[0][0], self._calls[-1][1]
        return {
            "warm policy episode": whole,
            "  until the first model call: Ray, sandbox, agent": first - start,
            f"  {len(self._calls)} model calls, of a scripted policy": model,
            "  between them: the agent's commands": last - first - model,
            "  after the last: submission and grading": start + whole - last,
        }


# --- the run's processes ---------------------------------------------------------------


def _processes_of(run: Path) -> list[Path]:
    mark, found = f"{RUN_VARIABLE}={run}".encode(), []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes().split(b"\0"):
                found.append(process)
    return found


def _memory_mib(run: Path) -> float:
    """Memory of the run's processes, what they share counted once."""
    return sum(map(_mib, _processes_of(run)))


def _mib(process: Path) -> float:
    with contextlib.suppress(OSError):
        lines = (process / "smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024
    return 0.0


def _is_worker(process: Path) -> bool:
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes().startswith((b"ray::IDLE", b"ray::runner"))
    return False


def _machines_cpu_s() -> float:
    """CPU time that the whole machine has spent: Ray's workers take theirs with them when they end."""
    user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:9]
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")
