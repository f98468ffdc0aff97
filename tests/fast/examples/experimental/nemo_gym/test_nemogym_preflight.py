"""What is wrong with the agent server is named before anything expensive starts."""

import json
import socket

import nemogym_preflight
import pytest
from aiohttp import web

from .conftest import OPENAPI


def _message(url: str) -> str:
    with pytest.raises(nemogym_preflight.PreflightError) as raised:
        nemogym_preflight.check_agent_server(url)
    return str(raised.value)


@pytest.mark.parametrize("suffix", ["", "/", "/run", "/prefix/"])
def test_an_agent_server_passes(stub, suffix, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    nemogym_preflight.check_agent_server(stub.url + suffix)


def test_no_scheme():
    message = _message("localhost:12000")
    assert "NEMO_GYM_URL" in message and "localhost:12000" in message and "http://" in message


def test_refused_names_the_url_but_no_password():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        message = _message(f"http://user:secret@127.0.0.1:{unused.getsockname()[1]}")
    assert "refused" in message and "127.0.0.1" in message and "secret" not in message


def test_unknown_host():
    assert "nowhere.invalid" in _message("http://nowhere.invalid:12000")


def test_silent_server(monkeypatch):
    monkeypatch.setattr(nemogym_preflight, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        assert "within 0.2 s" in _message(f"http://127.0.0.1:{silent.getsockname()[1]}")


def test_web_page(stub):
    stub.openapi = web.Response(text="<html>login</html>", content_type="text/html")
    message = _message(stub.url)
    assert "text/html" in message and "<html>login" in message


@pytest.mark.parametrize("status", [404, 502])
def test_other_status(stub, status):
    stub.openapi = web.Response(status=status)
    assert f"found {status}" in _message(stub.url)


@pytest.mark.parametrize("openapi", ["[]", "null", json.dumps({"paths": {"/v1/responses": {}}})])
def test_no_run_endpoint(stub, openapi):
    stub.openapi = openapi
    assert "POST /run" in _message(stub.url)


def test_agent_of_another_kind(stub):
    stub.openapi = {**OPENAPI, "components": {"schemas": {"OtherRunRequest": {}}}}
    assert "mini_swe_agent_2" in _message(stub.url)


def test_gym_too_old(stub):
    schema = {"type": "object", "properties": {"responses_create_params": {}}}
    stub.openapi = {**OPENAPI, "components": {"schemas": {"MiniSWEAgentRunRequest": schema}}}
    assert "nemo-gym>=0.6" in _message(stub.url)
