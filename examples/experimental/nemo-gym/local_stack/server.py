"""Start a real NeMo Gym on this machine and stop it without a trace.

Two ``mini_swe_agent_2`` servers from one configuration: one runs the policy, one applies gold patches. Both keep what
they write in the run's own folder, which goes when the run ends. Or, in their place, other environments of NeMo Gym behind
the session model.
"""

import contextlib
import fcntl
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import IO

import requests
from local_stack.docker_engine import remove_containers, run_arguments
from local_stack.environments import SESSION_MODEL_ROOT, Environment, environments_config, servers_of
from local_stack.paths import SOURCE, Paths, StackError
from local_stack.processes import RUN_VARIABLE, clear_dead_runs, locked, remove_run
from nemogym_environments import find_agent_url
from tqdm import tqdm

HOST = "127.0.0.1"
_AGENT = "mini_swe_agent_2"
_READY_TIMEOUT_S = 240.0
_STOP_TIMEOUT_S = 20.0
_POLL_S = 0.5
_STARTS = 2
_RAY_TOO_SLOW = "The current node timed out during startup"
_LOGS_KEPT = 10
# Limits of one container.
_TTL_S = 3600
_MEMORY_MIB = 2048
_PROCESSES = 512
_SERVERS = (
    f"responses_api_agents/{_AGENT}",
    "responses_api_models/openai_model",
    "environment_servers/legacy_agent",
)


@dataclass(frozen=True)
class Ports:
    """TCP ports of one run's HTTP servers, all on the loopback interface; Ray chooses its own.

    Args:
        policy: agent that runs the policy.
        golden: agent that applies gold patches.
        model: NeMo Gym's own model server, which gets no traffic here.
        head: NeMo Gym's head server.
    """

    policy: int
    golden: int
    model: int
    head: int

    @classmethod
    def block(cls, first: int) -> "Ports":
        """Take four ports in a row.

        Raises:
            StackError: one of them is taken; it is named.
        """
        ports = cls(*range(first, first + 4))
        for name, port in vars(ports).items():
            with socket.socket() as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                try:
                    probe.bind((HOST, port))
                except (OSError, OverflowError) as error:
                    raise StackError(
                        f"port {port} (for the {name} server) cannot be used: {error}. Expected {first} to {first + 3} "
                        "to be free: stop what uses it, or choose another block with PORT=<first>."
                    ) from error
        return ports

    @classmethod
    def free(cls) -> "Ports":
        """Take four ports that are free now."""
        with contextlib.ExitStack() as stack:
            probes = [stack.enter_context(socket.socket()) for _ in range(4)]
            for probe in probes:
                probe.bind((HOST, 0))
            return cls(*(probe.getsockname()[1] for probe in probes))


class Sandbox(str, Enum):
    """What an episode runs in."""

    BUBBLEWRAP = "bubblewrap"
    DOCKER = "docker"


@dataclass(frozen=True)
class Options:
    """Settings of the agent servers.

    Args:
        policy_model: model name that the agent sends to the policy's endpoint.
        concurrency: episodes at a time on each agent server.
        sandbox: what an episode runs in.
        step_limit: model calls of one episode.
        step_timeout: seconds for one command.
        eval_timeout: seconds for one run of the tests.
        environments: what runs in place of the mini-swe agents.
        sessions: session servers that these may call, ``host:port`` or ``host:first-last``.
    """

    policy_model: str = "model"
    concurrency: int = 8
    sandbox: Sandbox = Sandbox.BUBBLEWRAP
    step_limit: int = 10
    step_timeout: int = 60
    eval_timeout: int = 300
    environments: tuple[Environment, ...] = ()
    sessions: tuple[str, ...] = (f"{HOST}:1-65535",)


@dataclass(frozen=True)
class Stack:
    """A running NeMo Gym.

    Args:
        ports: where it listens.
        run: its working folder.
        log: its output.
        keeper: the process that holds all of its processes.
    """

    ports: Ports
    run: Path
    log: Path
    keeper: subprocess.Popen

    @property
    def policy_url(self) -> str:
        """Agent server that runs the policy: the NEMO_GYM_URL of a trainer."""
        return f"http://{HOST}:{self.ports.policy}"

    @property
    def golden_url(self) -> str:
        """Agent server that applies gold patches."""
        return f"http://{HOST}:{self.ports.golden}"

    @property
    def head_url(self) -> str:
        """NeMo Gym's head server."""
        return f"http://{HOST}:{self.ports.head}"

    def agent_url(self, name: str) -> str:
        """URL of an agent server, by its name in NeMo Gym's configuration.

        Raises:
            StackError: there is none.
        """
        with requests.Session() as session:
            session.trust_env = False
            instances = session.get(f"{self.head_url}/server_instances", timeout=10).json()
        try:
            return find_agent_url(instances, name, head_url=self.head_url)
        except ValueError as error:
            raise StackError(str(error)) from None

    def wait(self) -> None:
        """Return never, unless NeMo Gym ends by itself.

        Raises:
            StackError: it ended.
        """
        self.keeper.wait()
        raise StackError(f"NeMo Gym ended by itself. The end of {self.log}:\n{_tail(self.log)}")


@contextlib.contextmanager
def running_stack(paths: Paths, *, ports: Ports | None = None, options: Options | None = None) -> Iterator[Stack]:
    """Start NeMo Gym, wait until it is ready, and stop it when the block ends, by an error or Ctrl-C too.

    Args:
        paths: an installed local stack.
        ports: where to listen; free ones when None.
        options: settings of the agents; the defaults when None.

    Raises:
        StackError: it did not get ready; the message holds the end of its log.
    """
    ports, options = ports or Ports.free(), options or Options()
    run, lock = _new_run(paths)
    try:
        _remove_dead_containers(paths, options=options)
        with lock:
            _fill_run_folder(run, paths=paths, ports=ports, options=options)
            stack = _start_until_ready(paths, run=run, lock=lock, ports=ports, concurrency=options.concurrency)
        try:
            yield stack
        finally:
            _stop(stack.keeper)
    finally:
        remove_run(run)
        _remove_dead_containers(paths, options=options)


def gym_config(*, ports: Ports, options: Options, images: Path, run: Path) -> dict:
    """Return the configuration for ``gym env start``.

    Args:
        ports: where the servers listen.
        options: settings of the agents.
        images: folder of the sandbox images.
        run: the run's folder; below it ``environments`` has a virtual environment for each server.
    """
    provider, specification = _sandbox_config(options.sandbox, images=images, run=run)

    def agent(*, port: int, run_golden: bool) -> dict:
        return {
            "responses_api_agents": {
                _AGENT: {
                    "entrypoint": "app.py",
                    "host": HOST,
                    "port": port,
                    "domain": "coding",
                    "description": "SWE-bench tasks on this machine",
                    "value": "a first look on one machine",
                    "model_server": {"type": "responses_api_models", "name": "policy_model"},
                    "concurrency": options.concurrency,
                    "env": "sandbox",
                    "sandbox_provider": "sandbox",
                    "sandbox_spec": specification,
                    "sandbox_environment_kwargs": {
                        "cwd": "/testbed",
                        "conda_env": "testbed",
                        "activate_conda": True,
                        "user": "root",
                    },
                    "run_golden": run_golden,
                    "step_timeout": options.step_timeout,
                    "eval_timeout": options.eval_timeout,
                    "step_limit": options.step_limit,
                }
            }
        }

    return {
        "default_host": HOST,
        "head_server": {"host": HOST, "port": ports.head},
        "policy_model_name": options.policy_model,
        "skip_venv_if_present": True,
        "uv_venv_dir": str(run / "environments"),
        # The model server gets no traffic: every /run names its own endpoint.
        "model_endpoint_readiness_timeout_seconds": 0,
        _AGENT: agent(port=ports.policy, run_golden=False),
        f"{_AGENT}_golden": agent(port=ports.golden, run_golden=True),
        "sandbox": provider,
        "policy_model": {
            "responses_api_models": {
                "openai_model": {
                    "entrypoint": "app.py",
                    "host": HOST,
                    "port": ports.model,
                    "openai_base_url": f"http://{HOST}:9/v1",
                    "openai_api_key": "unused",
                    "openai_model": options.policy_model,
                }
            }
        },
    }


def _sandbox_config(sandbox: Sandbox, *, images: Path, run: Path) -> tuple[dict, dict]:
    """Return the sandbox provider's block and what each sandbox is asked to be."""
    if sandbox is Sandbox.DOCKER:
        create = {"pids_limit": _PROCESSES, "extra_run_args": run_arguments(run)}
        return {"guarded_docker": {"create": create}}, {"ttl_s": _TTL_S, "resources": {"memory_mib": _MEMORY_MIB}}
    return {"bubblewrap": {"image_root": str(images)}}, {"ready_timeout_s": 60}


def gym_environment(*, run: Path, concurrency: int) -> dict[str, str]:
    """Return the environment of NeMo Gym's processes.

    Args:
        run: the run's folder.
        concurrency: episodes at a time on each of the two agent servers.
    """
    # Without its modules' bytecode every worker of Ray compiles them anew, for 10 s.
    dropped = ("RAY_", "NEMO_GYM_", "PYTHONDONTWRITEBYTECODE")
    inherited = {key: value for key, value in os.environ.items() if not key.startswith(dropped)}
    no_proxy = ",".join(filter(None, [os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), HOST, "localhost"]))
    return {
        **inherited,
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        RUN_VARIABLE: str(run),
        "NEMO_GYM_EXTRA_ROOTS": str(SESSION_MODEL_ROOT),
        "RAY_ADDRESS": "local",  # never join a Ray that already runs here, such as a trainer's
        "RAY_TMPDIR": str((run / "ray").resolve()),
        "TMPDIR": str((run / "ray").resolve() / "tmp"),  # what the servers leave there goes with the run
        "RAY_USAGE_STATS_ENABLED": "0",
        # A token of the run's own; without one Ray makes ~/.ray/auth_token.
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        # An episode reserves a quarter of a CPU; it mostly waits.
        "RAY_OVERRIDE_RESOURCES": json.dumps({"CPU": max(2, concurrency // 2)}),
        # Ray ends idle workers beyond the number of CPUs after a second; a new one takes a CPU 5 s to start.
        "RAY_num_workers_soft_limit": str(concurrency),
        # By default Ray runs a task again whose worker died: a second episode in the same session.
        "RAY_TASK_MAX_RETRIES": "0",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        "MSWEA_SILENT_STARTUP": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
    }


def clear_killed_runs(paths: Paths) -> None:
    """End the processes and remove the folders that killed runs have left, Ray's outside of ``paths.root`` too."""
    with locked(paths.root / "runs.lock"):
        _clear(paths)


def _clear(paths: Paths) -> None:
    if left := clear_dead_runs(paths.runs):
        print(f"ended {len(left)} processes that a killed run had left", file=sys.stderr, flush=True)


def _new_run(paths: Paths) -> tuple[Path, IO[str]]:
    """Clear what killed runs left, then return a new run's folder and its lock, held."""
    with locked(paths.root / "runs.lock"):
        _clear(paths)
        run = paths.runs / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(2)}"
        run.mkdir(parents=True)
        lock = (run / "lock").open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return run, lock


def _remove_dead_containers(paths: Paths, *, options: Options) -> None:
    """Remove the containers of ended runs; where the engine fails, each still ends by itself when its time is up."""
    if options.sandbox is Sandbox.DOCKER:
        try:
            remove_containers(paths.runs)
        except StackError as error:
            print(f"containers of ended runs were not removed: {error}", file=sys.stderr, flush=True)


def _fill_run_folder(run: Path, *, paths: Paths, ports: Ports, options: Options) -> None:
    """Lay the run's folder out so that the agent servers write their results there and nowhere else."""
    # Ray's socket paths have to fit into 107 bytes, whatever TMPDIR is.
    (run / "ray").symlink_to(tempfile.mkdtemp(prefix="ngs-", dir="/tmp"))
    (run / "ray" / "tmp").mkdir()
    agent = run / _SERVERS[0]
    agent.mkdir(parents=True)
    for file in ("app.py", "requirements.txt"):
        (agent / file).symlink_to(paths.site_packages / _SERVERS[0] / file)
    for server in servers_of(options.environments) if options.environments else _SERVERS:
        environment = run / "environments" / server / ".venv"
        environment.parent.mkdir(parents=True)
        environment.symlink_to(paths.gym)
    config = gym_config(ports=ports, options=options, images=paths.images, run=run)
    if options.environments:
        common = ("default_host", "head_server", "policy_model_name", "skip_venv_if_present", "uv_venv_dir")
        config = {key: config[key] for key in common}
        config |= environments_config(options.environments, sessions=options.sessions)
    (run / "stack.yaml").write_text(json.dumps(config, indent=1))


def _start_until_ready(paths: Paths, *, run: Path, lock: IO[str], ports: Ports, concurrency: int) -> Stack:
    """Start NeMo Gym; once more where Ray gave up on a busy machine: it waits 30 s for itself, whatever is set."""
    for attempt in range(_STARTS):
        stack = _start(paths, run=run, lock=lock, ports=ports, concurrency=concurrency)
        try:
            _wait_until_ready(stack)
            return stack
        except BaseException as error:
            _stop(stack.keeper)
            is_last = attempt == _STARTS - 1
            if is_last or not isinstance(error, StackError) or _RAY_TOO_SLOW not in str(error):
                raise
            print("Ray did not come up within its 30 s; starting NeMo Gym once more", file=sys.stderr, flush=True)
    raise AssertionError("unreachable")


def _start(paths: Paths, *, run: Path, lock: IO[str], ports: Ports, concurrency: int) -> Stack:
    gym = [str(paths.gym / "bin" / "gym"), "env", "start", "--config", str(run / "stack.yaml")]
    environment = gym_environment(run=run, concurrency=concurrency)
    environment["PATH"] = f"{paths.gym / 'bin'}{os.pathsep}{environment.get('PATH', '')}"
    log_path = _new_log(paths.logs, name=run.name)
    with log_path.open("wb") as log:
        keeper = subprocess.Popen(
            [sys.executable, str(SOURCE / "keeper.py"), *gym],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=run,
            env=environment,
            pass_fds=[lock.fileno()],
        )
    return Stack(ports=ports, run=run, log=log_path, keeper=keeper)


def _new_log(logs: Path, *, name: str) -> Path:
    logs.mkdir(exist_ok=True)
    for old in sorted(logs.glob("*.log"))[: 1 - _LOGS_KEPT]:
        old.unlink(missing_ok=True)
    return logs / f"{name}.log"


def _wait_until_ready(stack: Stack) -> None:
    """Poll the head server, which answers once every server of the run does."""
    started = time.monotonic()
    bar = tqdm(desc="starting NeMo Gym", bar_format="{desc} {elapsed}", disable=not sys.stderr.isatty(), leave=False)
    if bar.disable:
        print(f"starting NeMo Gym (about 40 s; log: {stack.log})", file=sys.stderr, flush=True)
    with bar, requests.Session() as session:
        session.trust_env = False
        while not _is_ready(session, stack.head_url):
            ended = stack.keeper.poll() is not None
            if ended or time.monotonic() - started > _READY_TIMEOUT_S:
                state = "ended" if ended else f"was not ready after {_READY_TIMEOUT_S:g} s"
                raise StackError(f"NeMo Gym {state}. The end of {stack.log}:\n{_tail(stack.log)}")
            time.sleep(_POLL_S)
            bar.refresh()
    print(f"NeMo Gym is ready ({time.monotonic() - started:.0f} s)", file=sys.stderr, flush=True)


def _is_ready(session: requests.Session, head_url: str) -> bool:
    with contextlib.suppress(requests.RequestException):
        return session.get(f"{head_url}/readyz", timeout=2).status_code == 200
    return False


def _stop(keeper: subprocess.Popen) -> None:
    """Hang up; the keeper kills everything that it started and ends. A second Ctrl-C does not cut it short."""
    keeper.stdin.close()
    while True:
        try:
            keeper.wait(timeout=_STOP_TIMEOUT_S)
            return
        except KeyboardInterrupt:
            continue
        except subprocess.TimeoutExpired:
            print(f"process {keeper.pid} does not end; its run is cleared by the next start", file=sys.stderr)
            return


def _tail(path: Path, lines: int = 15) -> str:
    with contextlib.suppress(OSError):
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    return ""
