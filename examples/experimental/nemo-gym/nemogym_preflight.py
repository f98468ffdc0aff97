"""Checks that cost seconds, made before anything expensive starts: before GPUs by the launcher, before episodes by the scan.

    run_checks(job)                               all that can be told of servers, tasks and the way back, as findings
    check_agent_server(url)                       a mini_swe_agent_2 that takes a policy endpoint per request
    read_policy_model(url, head_url=...)          the model name that it sends to the policy endpoint
    check_policy_endpoint(url, model=, key=)      an OpenAI chat-completions endpoint that serves this model

This module reads the facts; nemogym_checks decides, nemogym_canary runs one episode for what only an episode can prove.

Environment: the connector's variables (nemogym_agent_function), and
  NEMO_GYM_HEAD_URL                      URL of the head server, or one for each server in NEMO_GYM_URL, comma-separated;
                                         unset, port 11000 of each agent server's host is tried
  OPENAI_API_KEY, else DEEPSEEK_API_KEY  key of a policy scan's endpoint

As a program it prints every finding as ok, warning or error, each with its remedy. Exit status: 0 no error, 2 an error,
130 interrupted.

  python nemogym_preflight.py --prompt-data swe_verified.jsonl
"""

import asyncio
import contextlib
import itertools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any
from urllib.parse import urlsplit

import nemogym_agent_function as connector
import requests
import typer
import yaml
from nemogym_canary import fly_canaries, session_url
from nemogym_checks import (
    AgentConfig,
    Finding,
    Settings,
    TaskFile,
    check_agent,
    check_apart,
    check_session_model,
    check_session_url,
    check_settings,
    check_tasks,
    find_agent_config,
    read_number,
)
from nemogym_contract import join_url, without_userinfo
from nemogym_environments import agent_name_of, build_environment_request, is_environment_row, task_key, way_of_agent
from swebench_rows import REASONS, REMOVED_FIELDS, UNSENDABLE, ungradable_reason

# A server under load takes seconds for its first /openapi.json.
_TIMEOUT_S = 15.0
_REQUEST_SCHEMA = "MiniSWEAgentRunRequest"

_KEY_VARIABLES = ("OPENAI_API_KEY", "DEEPSEEK_API_KEY")
_HEAD_PORT = 11000  # nemo_gym/global_config.py, DEFAULT_HEAD_SERVER_PORT
# The endpoint may be across the internet; a completion may wait for a model that is still loading.
_MODELS_TIMEOUT_S, _COMPLETION_TIMEOUT_S = 15.0, 60.0


class PreflightError(Exception):
    """The message says what was expected, what was found and what to do."""


class _Mismatch(PreflightError):
    """The same in three parts."""

    def __init__(self, *, expected: str, found: str, remedy: str) -> None:
        super().__init__(f"expected {expected}, found {found}. {remedy}")
        self.expected, self.found, self.remedy = expected, found, remedy


# --- all checks -------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """What a job is going to use.

    Attributes:
        prompt_data: paths of the tasks to train on, as Miles takes them: ``path``, ``path@[first:end]``.
        eval_data: the same for the tasks to evaluate on.
        session_host: address that the session server listens on.
        session_ports: its ports.
        in_flight: samples in flight at a time; None when it is not known.
    """

    prompt_data: Sequence[str] = ()
    eval_data: Sequence[str] = ()
    session_host: str = "0.0.0.0"
    session_ports: Sequence[int] = (30000,)
    in_flight: int | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Sequence[str]]) -> "Job":
        """The job of a train.py command line, as ``nemogym_checks.read_options`` reads it."""
        ports = [int(port) for port in options.get("--session-server-port", ()) if port.isdigit()] or [30000]
        prompts, samples = (read_number(options, name) for name in ("--rollout-batch-size", "--n-samples-per-prompt"))
        named_eval_data = options.get("--eval-prompt-data", ())
        return cls(
            prompt_data=options.get("--prompt-data", ()),
            # Names and paths in turn; one alone is a path.
            eval_data=named_eval_data[1::2] or named_eval_data,
            session_host=next(iter(options.get("--session-server-ip", ())), "0.0.0.0"),
            # Two ports are a half-open range (miles/ray/rollout/router_manager.py).
            session_ports=(range(*ports) if len(ports) == 2 else ports) or ports[:1],
            in_flight=prompts * samples if prompts and samples else None,
        )


def run_checks(job: Job, *, canary: bool = True) -> Iterator[Finding]:
    """All that can be told of variables, agent servers, tasks and the way back, one finding at a time.

    Args:
        job: what is going to be used.
        canary: also run one short episode on every agent server that is fit for it.
    """
    settings, about = read_settings(os.environ)
    yield from about
    training, evaluation = ([read_tasks(path) for path in paths] for paths in (job.prompt_data, job.eval_data))
    agents = frozenset().union(*(tasks.agents for tasks in (*training, *evaluation)))
    usable = []
    if all(finding.level == "ok" for finding in about):
        yield from _check_agents(agents)
        only_environments = agents and not any(tasks.first for tasks in (*training, *evaluation))
        for server in () if only_environments else settings.servers:
            about = [*_check_server(server, settings, in_flight=job.in_flight), _check_way_back(server, job, settings)]
            yield from about
            usable += [] if any(finding.level == "error" for finding in about) else [server]
    for tasks in (*training, *evaluation):
        yield from check_tasks(tasks)
    for pair in itertools.product(training, evaluation):
        yield from check_apart(*pair)
    if canary and usable:
        task = next((tasks.first for tasks in (*training, *evaluation) if tasks.first), None)
        yield from _fly(usable, task, job)


def read_settings(environment: Mapping[str, str]) -> tuple[Settings, list[Finding]]:
    """The settings in the environment, and what is wrong with them; where that is so, they are the defaults.

    Args:
        environment: ``os.environ``; the connector reads its own from there.
    """
    try:
        own = connector.Settings.from_environment()
    except ValueError as problem:
        name, _, message = str(problem).partition(": ")
        return Settings(), [Finding.of_message(name, message, remedy="Correct it, or unset it.")]
    head_urls = environment.get("NEMO_GYM_HEAD_URL", "").split(",")
    settings = Settings(
        servers=own.servers,
        head_urls=tuple(url.strip() for url in head_urls if url.strip()),
        run_timeout_s=own.timeout_s,
        drain_timeout_s=own.drain_timeout_s,
        max_concurrency=own.limits.concurrency,
        ungraded=environment.get("NEMO_GYM_UNGRADED", "").strip() or "drop",
        external_host=own.external_host,
    )
    shown = ", ".join(without_userinfo(server) for server in settings.servers)
    return settings, check_settings(settings) or [Finding.ok("settings", f"episodes run on {shown}")]


def _check_server(server: str, settings: Settings, *, in_flight: int | None) -> Iterator[Finding]:
    name = f"agent server {without_userinfo(server)}"
    try:
        check_agent_server(server)
    except _Mismatch as problem:
        yield Finding.error(name, expected=problem.expected, found=problem.found, remedy=problem.remedy)
        return
    yield Finding.ok(name, "mini_swe_agent_2, takes a policy per request (NeMo Gym 0.6 or newer)")
    try:
        agent, reason = read_agent_config(server, head_url=settings.head_url(server))
    except _Mismatch as problem:
        yield Finding.error(name, expected=problem.expected, found=problem.found, remedy=problem.remedy)
        return
    if agent is not None:
        yield from check_agent(server, agent, settings, in_flight=in_flight)
        return
    yield Finding.warning(
        name,
        expected="its configuration from a head server, to check run_golden, skip_if_exists, timeouts and sandbox",
        found=reason,
        remedy="Name the head server with NEMO_GYM_HEAD_URL; until then these are not checked.",
    )


def _check_agents(agents: Collection[str]) -> Iterator[Finding]:
    """Whether the agents that NeMo Gym rows name can be reached, and themselves reach the trainer's sessions."""
    settings = connector.Settings.from_environment()
    for agent in sorted(agents):
        row = {"responses_create_params": {}, **({"agent_ref": {"name": agent}} if agent else {})}
        name = f"agent {agent}" if agent else "rows without agent_ref"
        try:
            servers, way = asyncio.run(connector.locate(row, settings))
        except (ValueError, OSError) as problem:
            yield Finding.of_message(name, str(problem), remedy="Correct NEMO_GYM_HEAD_URL, NEMO_GYM_URL or the rows.")
            continue
        shown = ", ".join(map(without_userinfo, servers))
        yield Finding.ok(name, f"{shown}, reaches its session by {way}")
    needs_model = bool(agents) and settings.way != "policy_base_url"
    for head_url in settings.head_urls if needs_model else ():
        try:
            yield check_session_model(f"head server {without_userinfo(head_url)}", _read_global_config(head_url))
        except (requests.RequestException, ValueError) as problem:
            yield Finding.of_message(
                f"head server {without_userinfo(head_url)}",
                f"expected its configuration, found {_cause(problem)}",
                remedy="Correct NEMO_GYM_HEAD_URL.",
            )


def _check_way_back(server: str, job: Job, settings: Settings) -> Finding:
    session = session_url(job.session_host, job.session_ports[0], "0" * 32)
    try:
        url = asyncio.run(connector.reachable_policy_url(session, server, connector.Settings.from_environment()))
    except ValueError as problem:
        return Finding.error(
            "session URL",
            expected="--session-server-ip to be an address of this machine, without scheme and port",
            found=str(problem),
            remedy="Correct it; 0.0.0.0 listens on every interface.",
        )
    return check_session_url(url, server, external_host=settings.external_host)


def _fly(servers: Sequence[str], task: Mapping[str, Any] | None, job: Job) -> list[Finding]:
    if task is None:
        return [
            Finding.warning(
                "canary episode",
                expected="a task to run",
                found="none",
                remedy="Name prompt data; until then callback, image and sandbox are not proven.",
            )
        ]
    canaries = fly_canaries(servers, task, session_host=job.session_host, session_ports=job.session_ports)
    return asyncio.run(canaries)


def print_findings(findings: Iterable[Finding]) -> int:
    """Print each finding as it comes, then how many there were of each kind.

    Returns:
        The number of errors.
    """
    counts: Counter[str] = Counter()
    for finding in findings:
        counts[finding.level] += 1
        print(finding, flush=True)
    print(f"{counts['ok']} ok, {counts['warning']} warning(s), {counts['error']} error(s)", flush=True)
    return counts["error"]


# --- tasks ------------------------------------------------------------------------

_SLICED = re.compile(r"(.*)@\[(-?\d*):(-?\d*)\]")


def read_tasks(path: str) -> TaskFile:
    """What is in a file of prompt data, JSONL.

    Args:
        path: as Miles takes it, ``path`` or ``path@[first:end]`` (miles/utils/data.py).
    """
    sliced = _SLICED.fullmatch(path)
    file, *ends = sliced.groups() if sliced else (path, "", "")
    if not os.path.exists(file):
        return TaskFile(path, unreadable="no such file")
    if file.endswith(".parquet"):
        return TaskFile(path, unchecked="a Parquet file")
    if not file.endswith(".jsonl"):
        return TaskFile(path, unreadable="a file that Miles does not read, which takes .jsonl and .parquet")
    try:
        with open(file, "rb") as lines:
            numbered = ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
            first, end = (int(end) if end else None for end in ends)
            return _judge_rows(path, itertools.islice(numbered, first, end))
    except OSError as problem:
        return TaskFile(path, unreadable=problem.strerror or str(problem))
    except ValueError:
        return TaskFile(path, unreadable="a slice that Miles does not take: its ends count from the first row")


def _judge_rows(path: str, lines: Iterable[tuple[int, bytes]]) -> TaskFile:
    ids: list[str] = []
    unfit: list[str] = []
    ungradable: list[str] = []
    agents: set[str] = set()
    raw, first = 0, None
    for number, line in lines:
        row = _parsed(line)
        task = row.get("metadata") if isinstance(row, dict) and not is_environment_row(row) else None
        if not isinstance(task, dict):
            is_raw = isinstance(row, dict) and ("instance_id" in row or is_environment_row(row))
            raw += is_raw
            unfit += [] if is_raw else [f"line {number}: no object with prompt and metadata"]
            continue
        if is_environment_row(task):
            if problem := _unfit_environment_reason(row, task):
                unfit.append(f"line {number}: {problem}")
            else:
                ids.append(task_key(task))
                agents.add(agent_name_of(task) or "")
            continue
        reason = ungradable_reason(task)
        if problem := _unfit_reason(row, task, reason):
            unfit.append(f"line {number}: {problem}")
            continue
        ids.append(task["instance_id"].lower())
        if reason:
            ungradable.append(f"line {number}: {REASONS[reason]}")
        first = first or (None if reason else task)
    return TaskFile(path, ids=ids, raw=raw, unfit=unfit, ungradable=ungradable, first=first, agents=frozenset(agents))


def _unfit_environment_reason(row: Mapping[str, Any], task: Mapping[str, Any]) -> str | None:
    if not row.get("prompt"):
        return "no prompt"
    if misleading := sorted((REMOVED_FIELDS - {"responses_create_params"}) & task.keys()):
        return f"its metadata holds {', '.join(misleading)}, which trainer or connector take for their own"
    try:
        build_environment_request(task, {})
    except ValueError as problem:
        return str(problem)
    return None


def _unfit_reason(row: Mapping[str, Any], task: Mapping[str, Any], reason: str | None) -> str | None:
    """Why a prompt row cannot be sent or would mislead the trainer; None when it can."""
    if not row.get("prompt"):
        return "no prompt"
    misleading = sorted(REMOVED_FIELDS & task.keys())
    if misleading:
        return f"its metadata holds {', '.join(misleading)}, which trainer or connector take for their own"
    return REASONS[reason] if reason in UNSENDABLE else None


def _parsed(line: bytes) -> Any:
    with contextlib.suppress(ValueError, RecursionError):
        return json.loads(line)
    return None


# --- agent server -----------------------------------------------------------------


def check_agent_server(url: str) -> None:
    """Check that ``url`` is a mini_swe_agent_2 server that takes a policy endpoint per request (NeMo Gym 0.6 or newer).

    Reads ``/openapi.json`` only; no episode is started.

    Args:
        url: URL of the agent server, as in NEMO_GYM_URL.

    Raises:
        PreflightError: it is not, or cannot be reached within 15 s.
    """
    openapi = _read_openapi(_openapi_url(url))
    url = without_userinfo(url)
    if "/run" not in _dict_at(openapi, "paths"):
        raise _Mismatch(
            expected=f"a NeMo Gym agent server with POST /run at {url}",
            found="a server without it",
            remedy="Is this the head or a model server? `GET :11000/server_instances` lists the agent's URL.",
        )
    schema = _dict_at(openapi, "components", "schemas", _REQUEST_SCHEMA)
    if not schema:
        raise _Mismatch(
            expected=f"the agent mini_swe_agent_2 at {url}",
            found=f"a /run of another kind (no {_REQUEST_SCHEMA})",
            remedy="Start that agent, or point NEMO_GYM_URL at it.",
        )
    if "policy_base_url" not in _dict_at(schema, "properties"):
        raise _Mismatch(
            expected=f"{_REQUEST_SCHEMA}.policy_base_url at {url}",
            found="a server without it: it would ignore the trainer's session and call its own model",
            remedy="Install nemo-gym>=0.6 and restart it.",
        )


def check_environment_server(url: str) -> None:
    """Check that ``url`` is an agent server of any NeMo Gym environment; reads ``/openapi.json`` only.

    Args:
        url: URL of the agent server, as in NEMO_GYM_URL.

    Raises:
        PreflightError: it is not, or cannot be reached within 15 s.
    """
    try:
        way_of_agent(_read_openapi(_openapi_url(url)))
    except ValueError as problem:
        raise PreflightError(f"{without_userinfo(url)}: {problem}") from None


def read_agent_config(server: str, *, head_url: str | None) -> tuple[AgentConfig | None, str]:
    """An agent server's configuration, as its head server tells it.

    Args:
        server: URL of the agent server; its port is how it is found.
        head_url: URL of its head server; None tries port 11000 of the same host.

    Returns:
        The configuration, or None and the reason.

    Raises:
        PreflightError: a given ``head_url`` is no head server that answers.
    """
    shown = without_userinfo(head_url or _default_head_url(server))
    try:
        config = _read_global_config(head_url or _default_head_url(server))
    except (requests.RequestException, ValueError) as problem:
        if head_url is not None:
            raise _no_head_server(head_url, problem, option="NEMO_GYM_HEAD_URL") from None
        return None, f"none at {shown} ({_cause(problem)})"
    agent = find_agent_config(config, port=_port(server))
    return agent, "" if agent else f"one at {shown} that configures no agent on port {_port(server)}"


# --- policy endpoint --------------------------------------------------------------


@dataclass(frozen=True)
class PolicyKey:
    """A policy endpoint's bearer key.

    Attributes:
        variable: the environment variable that it came from; what messages name.
        value: the key itself; never in ``repr``.
    """

    variable: str
    value: str = field(repr=False)

    @classmethod
    def from_environment(cls) -> "PolicyKey | None":
        """OPENAI_API_KEY, else DEEPSEEK_API_KEY; None when both are unset or empty.

        Raises:
            PreflightError: it holds something that no HTTP header can carry.
        """
        for variable in _KEY_VARIABLES:
            value = os.environ.get(variable, "").strip()
            if value:
                if not re.fullmatch(r"[!-~]+", value):
                    raise PreflightError(f"expected {variable} to be visible ASCII characters, found others in it")
                return cls(variable, value)
        return None

    def mask(self, value: Any) -> Any:
        """``value``, any JSON, with the key replaced by ``***`` in every string of it, object keys included."""
        if isinstance(value, str):
            return value.replace(self.value, "***")
        if isinstance(value, dict):
            return {self.mask(name): self.mask(item) for name, item in value.items()}
        return [self.mask(item) for item in value] if isinstance(value, (list, tuple)) else value


def read_policy_model(agent_url: str, *, head_url: str | None = None) -> str | None:
    """The model name that the agent server sends to every policy endpoint: its ``policy_model_name``.

    No request can change it (app.py of mini_swe_agent_2); the head server tells it in ``/global_config_dict_yaml``, a
    JSON string of YAML. That answer also holds keys: nothing of it but this name is kept or shown.

    Args:
        agent_url: URL of the agent server.
        head_url: URL of its head server; None tries port 11000 of the same host, and takes that for the head server
            of this agent only if it configures the agent's port.

    Returns:
        The name; None when it cannot be told.

    Raises:
        PreflightError: a given ``head_url`` is no head server that answers.
    """
    try:
        config = _read_global_config(head_url or _default_head_url(agent_url))
    except (requests.RequestException, ValueError) as problem:
        if head_url is None:
            return None
        raise _no_head_server(head_url, problem, option="--head-url (NEMO_GYM_HEAD_URL)") from None
    if head_url is None and not _holds_port(config, _port(agent_url)):
        return None
    name = config.get("policy_model_name")
    return None if name is None or "${" in str(name) else str(name)


def check_policy_endpoint(base_url: str, *, model: str | None, key: PolicyKey | None) -> str | None:
    """Check that ``base_url`` is an OpenAI chat-completions endpoint that takes this key and serves this model.

    ``GET {base_url}/models`` decides. An endpoint without it (404, 405, 501) is asked for one completion of one token,
    ``POST {base_url}/chat/completions``: only a wrong URL, a refused key, or a model it does not know answers that with
    401, 403, 404, or without JSON; any other JSON answer, a refusal of the short request included, is an endpoint.

    Args:
        base_url: as for OPENAI_BASE_URL: what ``/chat/completions`` is appended to.
        model: name that the agent will send; None when it is not known.
        key: bearer key; None sends none.

    Returns:
        What could not be checked, one sentence for a warning; None when all was.

    Raises:
        PreflightError: it is no such endpoint, or cannot be reached; never with the key in the message.
    """
    try:
        return _check_policy_endpoint(_checked_base_url(base_url), model=model, key=key)
    except PreflightError as error:
        raise PreflightError(key.mask(str(error)) if key else str(error)) from None


def _check_policy_endpoint(base_url: str, *, model: str | None, key: PolicyKey | None) -> str | None:
    response = _ask_endpoint("GET", f"{base_url}/models", key=key, timeout_s=_MODELS_TIMEOUT_S)
    if response.status_code in (404, 405, 501):
        return _check_completion(base_url, model=model, key=key)
    answer = _endpoint_json(response)
    if response.status_code != 200:
        raise PreflightError(f"{_found(response)} Is the policy endpoint up, and its path right?")
    entries = answer.get("data") if isinstance(answer, dict) else None
    served = [str(entry["id"]) for entry in entries or [] if isinstance(entry, dict) and entry.get("id")]
    if not served:
        return f"{without_userinfo(base_url)}/models lists no model, so that the model name could not be checked"
    if model is None:
        return (
            f"the model name that the agent server sends is not known (no head server answered; --head-url or "
            f"--policy-model tells it), so that it was not compared with what the endpoint serves: {_listed(served)}"
        )
    if model not in served:
        raise PreflightError(
            f"expected the policy endpoint {without_userinfo(base_url)} to serve the model {model!r}, which is the name "
            f"that the agent sends, found {_listed(served)}. Start NeMo Gym with policy_model_name set to one of these "
            "(local stack: POLICY_MODEL=<name>), or serve the model under that name."
        )
    return None


def _check_completion(base_url: str, *, model: str | None, key: PolicyKey | None) -> str | None:
    url = f"{base_url}/chat/completions"
    request = {"model": model or "model", "messages": [{"role": "user", "content": "Say OK."}], "max_tokens": 1}
    response = _ask_endpoint("POST", url, key=key, timeout_s=_COMPLETION_TIMEOUT_S, json=request)
    if response.status_code in (404, 405):
        raise PreflightError(
            f"{_found(response)} and {response.status_code} for /models too. Is it a base URL such as "
            f"http://host:8000/v1, which /chat/completions is appended to, and is {request['model']!r} a model it has?"
        )
    _endpoint_json(response)
    if response.status_code >= 500:
        raise PreflightError(f"{_found(response)} Is the policy endpoint up?")
    return (
        None if model else f"{without_userinfo(base_url)} has no /models and the model name is not known: not checked"
    )


def _ask_endpoint(
    method: str, url: str, *, key: PolicyKey | None, timeout_s: float, **request: Any
) -> requests.Response:
    shown = without_userinfo(url)
    headers = {"Authorization": f"Bearer {key.value}"} if key else {}
    try:
        with requests.Session() as session:
            # A .netrc must not replace the key; proxies are for this endpoint what they are for the agent's client.
            session.trust_env = False
            session.proxies.update(requests.utils.get_environ_proxies(url))
            response = session.request(
                method, url, headers=headers, timeout=timeout_s, allow_redirects=False, **request
            )
    except requests.Timeout:
        raise PreflightError(f"expected an answer from {shown} within {timeout_s:g} s, found none.") from None
    except requests.RequestException as error:
        raise PreflightError(
            f"expected a policy endpoint at {shown}, found no connection ({_cause(error)}). "
            "Start it, or correct the policy's base URL."
        ) from None
    if response.status_code in (401, 403):
        raise PreflightError(
            f"the policy endpoint refused the key in {key.variable} ({response.status_code} from {shown})."
            if key
            else f"the policy endpoint asks for a key ({response.status_code} from {shown}). "
            f"Set {' or '.join(_KEY_VARIABLES)}."
        )
    return response


def _endpoint_json(response: requests.Response) -> Any:
    try:
        return response.json()
    except ValueError:
        raise PreflightError(
            f"{_found(response)} Something else, such as a proxy or a web page, listens there; correct the policy's "
            "base URL (it often ends in /v1)."
        ) from None


def _found(response: requests.Response) -> str:
    kind = response.headers.get("Content-Type", "no content type")
    where = without_userinfo(response.url)
    target = f" to {without_userinfo(response.headers['Location'])}" if response.is_redirect else ""
    return (
        f"expected JSON and HTTP 200 from the policy endpoint's {where}, found {response.status_code}{target} with "
        f"{kind}: {' '.join(response.text.split())[:160]!r}."
    )


def _checked_base_url(base_url: str) -> str:
    try:
        join_url(base_url, "models")
    except ValueError as error:
        raise PreflightError(f"policy endpoint: {error}.") from None
    bare = base_url.strip().rstrip("/")
    parts = urlsplit(bare)
    if parts.query or parts.fragment or parts.path.endswith(("/chat/completions", "/models", "/completions")):
        raise PreflightError(
            "policy endpoint: expected a base URL such as http://host:8000/v1, which /chat/completions is appended to, "
            f"found {without_userinfo(bare)!r}."
        )
    return bare


def _read_global_config(head_url: str) -> dict[str, Any]:
    """The head server's configuration, a JSON string of YAML. It shows keys in clear: never print it."""
    with requests.Session() as session:
        session.trust_env = False
        response = session.get(join_url(head_url, "global_config_dict_yaml"), timeout=_TIMEOUT_S)
    if response.status_code != 200:
        raise ValueError(f"HTTP {response.status_code}")
    text = response.json()
    try:
        config = yaml.safe_load(text) if isinstance(text, str) else None
    except yaml.YAMLError:
        config = None
    if not isinstance(config, dict):
        raise ValueError("no global_config_dict_yaml")
    return config


def _no_head_server(head_url: str, problem: Exception, *, option: str) -> PreflightError:
    return _Mismatch(
        expected=f"a NeMo Gym head server at {without_userinfo(head_url)}",
        found=f"none ({_cause(problem)})",
        remedy=f"Correct {option}, or leave it out.",
    )


def _holds_port(config: Any, port: int) -> bool:
    """Whether a configuration has a server on this port, however deep."""
    if not isinstance(config, dict):
        return False
    return config.get("port") == port or any(_holds_port(value, port) for value in config.values())


def _default_head_url(agent_url: str) -> str:
    parts = urlsplit(agent_url.strip())
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{_HEAD_PORT}"


def _port(url: str) -> int:
    parts = urlsplit(url.strip())
    return parts.port or (443 if parts.scheme == "https" else 80)


def _listed(names: list[str], shown: int = 8) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _openapi_url(url: str) -> str:
    try:
        return join_url(url, "openapi.json")
    except ValueError as problem:
        raise PreflightError(f"URL of the agent server: {problem}. Set NEMO_GYM_URL.") from None


def _read_openapi(openapi_url: str) -> Any:
    shown = without_userinfo(openapi_url)
    try:
        with requests.Session() as session:
            session.trust_env = False
            response = session.get(openapi_url, timeout=_TIMEOUT_S)
    except requests.Timeout:
        raise _Mismatch(
            expected=f"an answer from {shown} within {_TIMEOUT_S:g} s",
            found="none",
            remedy="Is the host right, and is the server still starting or overloaded?",
        ) from None
    except requests.RequestException as problem:
        raise _Mismatch(
            expected=f"a NeMo Gym agent server at {shown}",
            found=f"no connection ({_cause(problem)})",
            remedy="Start the server, or correct the host and port in NEMO_GYM_URL.",
        ) from None
    if response.status_code != 200:
        raise _Mismatch(
            expected=f"HTTP 200 from {shown}",
            found=f"{response.status_code}",
            remedy="Is this a NeMo Gym agent server, and is the path prefix in NEMO_GYM_URL right?",
        )
    try:
        return response.json()
    except ValueError:
        kind = response.headers.get("Content-Type", "no content type")
        raise _Mismatch(
            expected=f"JSON from {shown}",
            found=f"{kind}: {response.text[:80]!r}",
            remedy="Something else, such as a proxy or a web page, listens there; correct NEMO_GYM_URL.",
        ) from None


def _cause(error: BaseException) -> str:
    """The innermost reason, e.g. ``Connection refused``, without urllib3's wrapping."""
    reason = getattr(error.args[0] if error.args else None, "reason", None)
    return str(reason or error).rpartition(": ")[2]


def _dict_at(value: Any, *keys: str) -> dict[str, Any]:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}


# --- command line -----------------------------------------------------------------


def main(
    prompt_data: Annotated[
        list[str] | None, typer.Option(help="Tasks to train on, as train.py takes them; may be given several times.")
    ] = None,
    eval_data: Annotated[
        list[str] | None, typer.Option(help="Tasks to evaluate on; may be given several times.")
    ] = None,
    session_server_ip: Annotated[
        str, typer.Option(help="Address that the session server will listen on.")
    ] = "0.0.0.0",
    session_server_port: Annotated[int, typer.Option(help="Its port.", min=1, max=65535)] = 30000,
    canary: Annotated[bool, typer.Option(help="Run one short episode on every agent server.")] = True,
) -> None:
    """Check what a training job on NeMo Gym needs: ok, warning or error, each with its remedy."""
    job = Job(
        prompt_data=prompt_data or (),
        eval_data=eval_data or (),
        session_host=session_server_ip,
        session_ports=(session_server_port,),
    )
    try:
        errors = print_findings(run_checks(job, canary=canary))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    raise typer.Exit(2 if errors else 0)


if __name__ == "__main__":
    # Plain tracebacks: the decorated ones show local variables, and one of them may be a key.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
