"""Checks of a NeMo Gym agent server and of a policy endpoint that cost seconds, made before anything expensive starts.

Shared by the launcher (before GPUs) and the scan (before episodes).

    check_agent_server(url)                       a mini_swe_agent_2 that takes a policy endpoint per request
    read_policy_model(url, head_url=...)          the model name that it sends to the policy endpoint
    check_policy_endpoint(url, model=, key=)      an OpenAI chat-completions endpoint that serves this model

Environment: OPENAI_API_KEY, else DEEPSEEK_API_KEY (``PolicyKey.from_environment``).

  python -c 'import nemogym_preflight; nemogym_preflight.check_agent_server("http://localhost:12000")'
"""

import json
import os
import re
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import requests
from nemogym_contract import join_url, without_userinfo

_TIMEOUT_S = 5.0
_REQUEST_SCHEMA = "MiniSWEAgentRunRequest"

_KEY_VARIABLES = ("OPENAI_API_KEY", "DEEPSEEK_API_KEY")
_HEAD_PORT = 11000  # nemo_gym/global_config.py, DEFAULT_HEAD_SERVER_PORT
# The endpoint may be across the internet; a completion may wait for a model that is still loading.
_MODELS_TIMEOUT_S, _COMPLETION_TIMEOUT_S = 15.0, 60.0


class PreflightError(Exception):
    """The message says what was expected, what was found and what to do."""


def check_agent_server(url: str) -> None:
    """Check that ``url`` is a mini_swe_agent_2 server that takes a policy endpoint per request (NeMo Gym 0.6 or newer).

    Reads ``/openapi.json`` only; no episode is started.

    Args:
        url: URL of the agent server, as in NEMO_GYM_URL.

    Raises:
        PreflightError: it is not, or cannot be reached within 5 s.
    """
    openapi = _read_openapi(_openapi_url(url))
    url = without_userinfo(url)
    if "/run" not in _dict_at(openapi, "paths"):
        raise PreflightError(
            f"expected a NeMo Gym agent server with POST /run at {url}, found a server without it. "
            "Is this the head or a model server? `GET :11000/server_instances` lists the agent's URL."
        )
    schema = _dict_at(openapi, "components", "schemas", _REQUEST_SCHEMA)
    if not schema:
        raise PreflightError(
            f"expected the agent mini_swe_agent_2 at {url}, found a /run of another kind (no {_REQUEST_SCHEMA}). "
            "Start that agent, or point NEMO_GYM_URL at it."
        )
    if "policy_base_url" not in _dict_at(schema, "properties"):
        raise PreflightError(
            f"expected {_REQUEST_SCHEMA}.policy_base_url at {url}, found a server without it: it would ignore the "
            "trainer's session and call its own model. Install nemo-gym>=0.6 and restart it."
        )


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
    except (requests.RequestException, ValueError) as error:
        if head_url is None:
            return None
        raise PreflightError(
            f"expected a NeMo Gym head server at {without_userinfo(head_url)}, found none ({_cause(error)}). "
            "Correct --head-url (NEMO_GYM_HEAD_URL), or leave it out."
        ) from None
    if head_url is None and not re.search(rf"^\s+port: {_port(agent_url)}$", config, re.MULTILINE):
        return None
    line = re.search(r"^policy_model_name: *(.*?) *$", config, re.MULTILINE)
    return _yaml_scalar(line[1]) if line else None


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


def _read_global_config(head_url: str) -> str:
    with requests.Session() as session:
        session.trust_env = False
        response = session.get(join_url(head_url, "global_config_dict_yaml"), timeout=_TIMEOUT_S)
    if response.status_code != 200:
        raise ValueError(f"HTTP {response.status_code}")
    config = response.json()
    if not isinstance(config, str):
        raise ValueError("no global_config_dict_yaml")
    return config


def _default_head_url(agent_url: str) -> str:
    parts = urlsplit(agent_url.strip())
    host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
    return f"{parts.scheme}://{host}:{_HEAD_PORT}"


def _port(url: str) -> int:
    parts = urlsplit(url.strip())
    return parts.port or (443 if parts.scheme == "https" else 80)


def _yaml_scalar(text: str) -> str | None:
    """A plain or quoted one-line scalar; None for null and for an interpolation that is not resolved."""
    if text.startswith('"'):
        try:
            return str(json.loads(text))
        except ValueError:
            return None
    if text.startswith("'"):
        return text[1:-1].replace("''", "'")
    return None if text in ("", "null", "~") or "${" in text else text


def _listed(names: list[str], shown: int = 8) -> str:
    return ", ".join(names[:shown]) + (f" and {len(names) - shown} more" if len(names) > shown else "")


def _openapi_url(url: str) -> str:
    try:
        return join_url(url, "openapi.json")
    except ValueError as error:
        raise PreflightError(f"URL of the agent server: {error}. Set NEMO_GYM_URL.") from None


def _read_openapi(openapi_url: str) -> Any:
    shown = without_userinfo(openapi_url)
    try:
        with requests.Session() as session:
            session.trust_env = False
            response = session.get(openapi_url, timeout=_TIMEOUT_S)
    except requests.Timeout:
        raise PreflightError(
            f"expected an answer from {shown} within {_TIMEOUT_S:g} s, found none. "
            "Is the host right, and is the server still starting or overloaded?"
        ) from None
    except requests.RequestException as error:
        raise PreflightError(
            f"expected a NeMo Gym agent server at {shown}, found no connection ({_cause(error)}). "
            "Start the server, or correct the host and port in NEMO_GYM_URL."
        ) from None
    if response.status_code != 200:
        raise PreflightError(
            f"expected HTTP 200 from {shown}, found {response.status_code}. "
            "Is this a NeMo Gym agent server, and is the path prefix in NEMO_GYM_URL right?"
        )
    try:
        return response.json()
    except ValueError:
        kind = response.headers.get("Content-Type", "no content type")
        raise PreflightError(
            f"expected JSON from {shown}, found {kind}: {response.text[:80]!r}. "
            "Something else, such as a proxy or a web page, listens there; correct NEMO_GYM_URL."
        ) from None


def _cause(error: BaseException) -> str:
    """The innermost reason, e.g. ``Connection refused``, without urllib3's wrapping."""
    reason = getattr(error.args[0] if error.args else None, "reason", None)
    return str(reason or error).rpartition(": ")[2]


def _dict_at(value: Any, *keys: str) -> dict[str, Any]:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value if isinstance(value, dict) else {}
