"""NeMo Gym's own rows: what is sent for one, what the answer means, which agent server runs it, and how its agent reaches
the policy.

A row of any NeMo Gym environment is ``{"responses_create_params": {"input", "tools", ...}, "agent_ref", <fields of its
verifier>}`` and goes to ``/run`` as it is; the trainer adds sampling settings. There are two ways for the agent to reach
the sample's session:

    policy_base_url  the request names the session's URL. Only the mini-swe agents take one, and they want SWE-bench rows
                     (``nemogym_contract.build_run_request``).
    session_model    the request's rollout id names the session; the agent passes it on to its model server, which has to
                     be the one in miles_session_model/. Every other agent.

Pure: no I/O, no environment variables, standard library only.
"""

import hashlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from nemogym_contract import NOT_FORWARDED, Outcome, agent_metrics, build_responses_create_params, read_answer

Way = Literal["policy_base_url", "session_model"]
WAYS: tuple[Way, ...] = get_args(Way)

# The field of a sample's metadata that holds what would be misread beside it.
SET_ASIDE = "nemo_gym_fields"

# Numbers of a rollout collection, which NeMo Gym would make part of the rollout id (nemo_gym/rollout_correlation.py).
_NUMBERING = re.compile(r"_ng_.*")
# Fields of an environment's answer that repeat the conversation or are told apart.
_NOT_REPORTED = frozenset(
    {"reward", "response", "responses_create_params", "ng_trajectory", "ng_model_call_capture", "mask_sample"}
)
_TO_ESCAPE = re.compile(r"[^A-Za-z0-9.-]")
_SESSION_PATH = re.compile(r"/sessions/([A-Za-z0-9-]+)/v1")
_LONGEST_ROLLOUT_ID = 230  # NeMo Gym makes a file name of it
_LONGEST_SHOWN = 200


# --- rows -----------------------------------------------------------------------


def is_environment_row(row: Any) -> bool:
    """Whether a task is a NeMo Gym row; one with a SWE-bench instance's fields at top level is taken for that."""
    if not isinstance(row, Mapping) or {"instance_id", "problem_statement"} <= row.keys():
        return False
    return isinstance(row.get("responses_create_params"), Mapping)


def task_of(row: Any) -> Any:
    """The task in a row of data: the row itself, or the metadata of a Miles prompt row."""
    is_task = isinstance(row, Mapping) and ("instance_id" in row or is_environment_row(row))
    if isinstance(row, Mapping) and not is_task and isinstance(row.get("metadata"), Mapping):
        return row["metadata"]
    return row


def prompt_of(row: Mapping[str, Any]) -> str:
    """The text of a NeMo Gym row's input, for people and for Miles' filter by length; the agent is sent the input itself."""
    asked = row["responses_create_params"]["input"]
    messages = [asked] if isinstance(asked, str) else [_text_of(item) for item in asked]
    return "\n\n".join(filter(None, messages)) or "(no text)"


def _text_of(item: Any) -> str:
    content = item.get("content") if isinstance(item, Mapping) else None
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""


def agent_name_of(row: Mapping[str, Any]) -> str | None:
    """The agent server that a row asks for in ``agent_ref``, by its name in NeMo Gym's configuration."""
    reference = row.get("agent_ref") if is_environment_row(row) else None
    name = reference.get("name") if isinstance(reference, Mapping) else None
    return name if isinstance(name, str) and name else None


def task_name(row: Mapping[str, Any]) -> str:
    """What a task is called in logs and by outages: its ``instance_id``, else its agent."""
    return str(row.get("instance_id") or agent_name_of(row) or "a task without a name")


def task_key(request: Mapping[str, Any]) -> str:
    """What tells a task of a request from others: its ``instance_id``, else a digest of its input."""
    if request.get("instance_id") is not None:
        return str(request["instance_id"])
    asked = json.dumps(request["responses_create_params"]["input"], sort_keys=True)
    return hashlib.blake2b(asked.encode(), digest_size=8).hexdigest()


def build_environment_request(row: Mapping[str, Any], request_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """Body of ``POST /run`` for a NeMo Gym row: the row, with the trainer's sampling settings.

    Input, tools and all else that the row has stays as it is. A sampling setting of the trainer replaces the row's own.

    Args:
        row: as in NeMo Gym's dataset, or with ``SET_ASIDE`` as ``row_metadata`` makes it. Only JSON values.
        request_kwargs: sampling settings, chat-completions names; see ``build_responses_create_params``.

    Raises:
        ValueError: there is no input, ``metadata`` or what was set aside has another form, or a field is not JSON.
    """
    if not is_environment_row(row):
        raise ValueError("expected a NeMo Gym row, found one without responses_create_params")
    own = row["responses_create_params"]
    if not isinstance(own.get("input"), (str, list)):
        raise ValueError(f"expected responses_create_params.input to be text or messages, found {own.get('input')!r}")
    aside = _object_or_none(row.get(SET_ASIDE), name=SET_ASIDE)
    fields = {key: value for key, value in row.items() if not is_reserved(key)} | aside
    request = {**fields, "responses_create_params": {**own, **_sampling(own, request_kwargs)}}
    try:
        json.dumps(request, allow_nan=False, ensure_ascii=False, sort_keys=True).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"expected the row to be JSON: {error}") from None
    return request


def row_metadata(row: Mapping[str, Any], *, misread: Collection[str]) -> dict[str, Any]:
    """A NeMo Gym row as the metadata of a Miles sample: fields that would be misread there are set aside.

    Args:
        row: as in NeMo Gym's dataset, or with fields that were set aside before; these stay so.
        misread: names of top-level fields that the trainer or the connector would take for their own.
    """
    aside = {key: value for key, value in row.items() if key in misread and key != "responses_create_params"}
    dropped = {*aside, SET_ASIDE}
    metadata = {key: value for key, value in row.items() if key not in dropped and not _NUMBERING.fullmatch(key)}
    aside = {**aside, **(row.get(SET_ASIDE) or {})}
    return {**metadata, SET_ASIDE: aside} if aside else metadata


def is_reserved(key: str) -> bool:
    """Whether a field of metadata is the trainer's, the connector's or a rollout collection's, and not the row's."""
    return key in NOT_FORWARDED or key == SET_ASIDE or bool(_NUMBERING.fullmatch(str(key)))


def _sampling(own: Mapping[str, Any], request_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The trainer's settings, those that ride in ``metadata.extra_body`` laid over the row's."""
    metadata = _object_or_none(own.get("metadata"), name="responses_create_params.metadata")
    extra_body = _extra_body(metadata.get("extra_body"))
    sampling = build_responses_create_params(request_kwargs)
    del sampling["input"]
    if "metadata" in sampling:
        extra_body |= json.loads(sampling["metadata"]["extra_body"])
        sampling["metadata"] = {**metadata, "extra_body": json.dumps(extra_body)}
    return sampling


def _extra_body(text: Any) -> dict[str, Any]:
    try:
        settings = {} if text is None else json.loads(text)
    except (TypeError, ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise ValueError(
            "expected responses_create_params.metadata.extra_body to be JSON text of an object, found "
            f"{_excerpt(text)}"
        )
    return settings


def _object_or_none(value: Any, *, name: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, Mapping):
        raise ValueError(f"expected {name} to be an object or null, found {_excerpt(value)}")
    return dict(value or {})


def _excerpt(value: Any) -> str:
    return f"{value!r:.{_LONGEST_SHOWN}}"


# --- answer -----------------------------------------------------------------------


def read_environment_response(status: int, body: bytes | str, row: Mapping[str, Any]) -> Outcome:
    """What an answer to ``POST /run`` for a NeMo Gym row says about the policy: any finite reward is a verdict.

    Args:
        status: HTTP status.
        body: the answer as received.
        row: the row that was sent; what the answer repeats of it is not reported.

    Returns:
        An Outcome; never raises for anything a server can send.
    """
    answer = read_answer(status, body)
    if isinstance(answer, Outcome):
        return answer
    report = {key: value for key, value in answer.items() if key not in row and key not in _NOT_REPORTED}
    if answer.get("mask_sample"):
        found = f"failure_kind {answer.get('failure_kind')!r}, {answer.get('failure_reason')!r}"
        detail = f"the environment masks this sample, its reward measures nothing: {found}"
        return Outcome("UnknownError", eval_report=report, detail=detail[:500])
    return Outcome(
        "Graded", answer["reward"], eval_report=report, agent_metrics=agent_metrics(answer.get("response"), {})
    )


# --- the way to the policy --------------------------------------------------------


def way_of_agent(openapi: Any) -> Way:
    """The way that an agent server takes, by the schema of its ``/run``.

    Args:
        openapi: its ``/openapi.json``.

    Raises:
        ValueError: it has no ``/run``, or is no description of a server.
    """
    document = openapi if isinstance(openapi, Mapping) else {}
    if "/run" not in _part(document, "paths"):
        raise ValueError("expected a NeMo Gym agent server with POST /run, found a server without it")
    schemas = _part(_part(document, "components"), "schemas")
    properties = [_part(_part(schemas, name), "properties") for name in schemas]
    return "policy_base_url" if any("policy_base_url" in one for one in properties) else "session_model"


def _part(document: Mapping[str, Any], name: str) -> dict[str, Any]:
    return _object_or_none(document.get(name), name=f"{name!r} of its openapi.json")


def policy_fields(way: Way, policy_base_url: str) -> dict[str, Any]:
    """The fields of the request that name the sample's session.

    Args:
        way: how the agent reaches it.
        policy_base_url: the session's OpenAI-compatible URL, as NeMo Gym reaches it.

    Raises:
        ValueError: it cannot be named this way.
    """
    if way == "policy_base_url":
        return {"policy_base_url": policy_base_url}
    return {"_ng_rollout_id": rollout_id_of(policy_base_url)}


def rollout_id_of(policy_base_url: str) -> str:
    """The rollout id that names a session; ``sessions.py`` of miles_session_model/ reads it.

    ``http://[fd00::1]:30000/sessions/3f2a/v1`` is ``http__fd00_3a_3a1__30000__3f2a``: NeMo Gym allows letters, digits,
    '.', '_' and '-' in it, and a letter or digit first (nemo_gym/rollout_correlation.py).

    Args:
        policy_base_url: as ``nemogym_contract.build_policy_base_url`` makes it.

    Raises:
        ValueError: it is no session's URL, or the host's name is too long.
    """
    url = urlsplit(policy_base_url)
    session = _SESSION_PATH.fullmatch(url.path)
    if not session or not url.hostname or url.scheme not in ("http", "https"):
        raise ValueError(f"expected a session's URL, http://host:port/sessions/<id>/v1, found {policy_base_url!r}")
    port = url.port or {"http": 80, "https": 443}[url.scheme]
    rollout_id = f"{url.scheme}__{_escaped(url.hostname)}__{port}__{session[1]}"
    if len(rollout_id) > _LONGEST_ROLLOUT_ID:
        raise ValueError(
            f"expected a session host whose rollout id has at most {_LONGEST_ROLLOUT_ID} characters, found {len(rollout_id)}: "
            "set MILES_ROUTER_EXTERNAL_HOST to an address"
        )
    return rollout_id


def _escaped(host: str) -> str:
    return _TO_ESCAPE.sub(lambda match: "".join(f"_{octet:02x}" for octet in match[0].encode()), host)


# --- the head server --------------------------------------------------------------


def find_agent_url(instances: Any, name: str, *, head_url: str) -> str:
    """The URL of an agent server, from what its head server lists.

    Args:
        instances: answer of the head server's ``/server_instances``.
        name: of the agent in NeMo Gym's configuration.
        head_url: URL of that head server; it replaces a host that only the server's own machine can reach.

    Raises:
        ValueError: there is no such agent; those that there are are named. Or its URL is none.
    """
    listed = [item for item in instances if isinstance(item, Mapping)] if isinstance(instances, Sequence) else []
    agents = {
        str(item.get("process_name")): item.get("url")
        for item in listed
        if item.get("server_type") == "responses_api_agents" and item.get("url")
    }
    if name not in agents:
        raise ValueError(
            f"expected the agent {name!r} of the row's agent_ref on {head_url}, found {', '.join(sorted(agents)) or 'none'}"
        )
    url, head = urlsplit(str(agents[name])), urlsplit(head_url)
    if url.hostname in ("127.0.0.1", "0.0.0.0", "localhost", "::1", "::"):
        host = f"[{head.hostname}]" if ":" in (head.hostname or "") else head.hostname
        url = url._replace(netloc=f"{host}:{url.port}" if url.port is not None else host)
    return url.geturl()
