"""The rollout id on its way from the connector, which writes it, to the model server, which reads it."""

import importlib.util
import re

import pytest
from nemogym_environments import rollout_id_of

from . import EXAMPLE_DIR

_FOLDER = EXAMPLE_DIR / "miles_session_model" / "responses_api_models" / "miles_session_model"
_SPEC = importlib.util.spec_from_file_location("miles_sessions", _FOLDER / "sessions.py")
sessions = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(sessions)

NAME = "0123456789abcdef0123456789abcdef"
# nemo_gym/rollout_correlation.py, ROLLOUT_ID_PATTERN
ACCEPTED_BY_NEMO_GYM = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def decoded(rollout_id, *allowed):
    return sessions.session_of(rollout_id, sessions.AllowList(allowed))


@pytest.mark.parametrize(
    "host, port, allowed",
    [
        ("10.0.0.5", ":30000", "10.0.0.5:30000"),
        ("10.0.0.5", ":30002", "10.0.0.5:30000-30003"),
        ("trainer-0.ray.svc.cluster.local", ":30000", "Trainer-0.ray.svc.cluster.local:30000"),
        ("under_score__twice", ":1", "under_score__twice:1"),
        ("[::1]", ":30000", "[::1]:30000"),
        ("[fd00::a:1]", ":65535", "[FD00:0:0::A:1]:65535"),
        ("[fe80::1%eth0]", ":30000", "[fe80::1%eth0]:30000"),
        ("xn--mnchen-3ya.example", ":30000", "XN--mnchen-3ya.example:30000"),
        ("127.0.0.1", "", "127.0.0.1:80"),
    ],
)
def test_every_host_survives(host, port, allowed):
    rollout_id = rollout_id_of(f"http://{host}{port}/sessions/{NAME}/v1")
    assert ACCEPTED_BY_NEMO_GYM.fullmatch(rollout_id)
    assert decoded(rollout_id, allowed).base_url == f"http://{host}{port or ':80'}/sessions/{NAME}/v1"


@pytest.mark.parametrize(
    "written, allowed",
    [("TRAINER.", "trainer"), ("trainer", "Trainer."), ("fd00_3a0_3a_3aA_3a1", "[fd00::a:1]")],
)
def test_the_host_that_is_called_is_the_one_that_was_compared(written, allowed):
    session = decoded(f"http__{written}__30000__{NAME}", f"{allowed}:30000")
    assert session.base_url == f"http://{allowed.lower().rstrip('.')}:30000/sessions/{NAME}/v1"


def test_https_and_its_port_survive():
    rollout_id = rollout_id_of(f"https://trainer/sessions/{NAME}/v1")
    assert decoded(rollout_id, "trainer:443").base_url == f"https://trainer:443/sessions/{NAME}/v1"


def test_two_hosts_never_share_an_id():
    hosts = ["a_b", "a-b", "a.b", "a_5fb", "a__b", "[a::b]", "[a:b::]"]
    assert len({rollout_id_of(f"http://{host}:1/sessions/{NAME}/v1") for host in hosts}) == len(hosts)


@pytest.mark.parametrize(
    "url",
    [
        f"http://host:1/sessions/{NAME}",
        "http://host:1/v1",
        "http://host:1/sessions/../v1",
        "http://host:1/sessions/a/b/v1",
        f"http:///sessions/{NAME}/v1",
        f"ftp://host/sessions/{NAME}/v1",
    ],
)
def test_what_is_no_session_has_no_id(url):
    with pytest.raises(ValueError, match="session's URL"):
        rollout_id_of(url)


def test_a_host_too_long_for_a_file_name_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match="MILES_ROUTER_EXTERNAL_HOST"):
        rollout_id_of(f"http://{'long.' * 50}example:1/sessions/{NAME}/v1")


@pytest.mark.parametrize(
    "rollout_id, allowed",
    [
        (f"http__10.0.0.5__30001__{NAME}", "10.0.0.5:30000"),
        (f"http__10.0.0.6__30000__{NAME}", "10.0.0.5:30000"),
        (f"http__10.0.0.5__30004__{NAME}", "10.0.0.5:30000-30003"),
        (f"http___3a_3a1__30000__{NAME}", "[::2]:30000"),
        (f"http__evil10.0.0.5__30000__{NAME}", "10.0.0.5:30000"),
    ],
)
def test_host_and_port_have_to_be_allowed(rollout_id, allowed):
    with pytest.raises(sessions.SessionRefused, match="add it to allowed_sessions"):
        decoded(rollout_id, allowed)


@pytest.mark.parametrize(
    "rollout_id",
    [
        "",
        "3-1",
        NAME,
        f"http__10.0.0.5__30000__{NAME}-a1/../x",
        "http__10.0.0.5__30000__a_2fb",
        f"http__10.0.0.5__0__{NAME}",
        f"http__10.0.0.5__99999__{NAME}",
        f"http__10.0.0.5_2f__30000__{NAME}",
        f"http__user_40host__30000__{NAME}",
        f"http__10.0.0.5_3a30000__30000__{NAME}",
        f"http__a_00b__30000__{NAME}",
        f"http__m_c3_bcnchen__30000__{NAME}",
        f"http___e2_84_aaube__30000__{NAME}",
        f"http__10.0.0.5__30000__{NAME}\n",
        f"file__10.0.0.5__30000__{NAME}",
    ],
)
def test_any_other_id_is_refused(rollout_id):
    with pytest.raises(sessions.SessionRefused, match="names a Miles session"):
        decoded(rollout_id, "10.0.0.5:30000")


def test_a_call_without_an_id_is_told_what_to_set():
    with pytest.raises(sessions.SessionRefused, match="observability_enabled=true"):
        decoded(None, "10.0.0.5:30000")


@pytest.mark.parametrize(
    "entry",
    [
        "10.0.0.5",
        "10.0.0.5:",
        ":30000",
        "::1:30000",
        "10.0.0.5:0",
        "10.0.0.5:70000",
        "10.0.0.5:3-2",
        "a/b:1",
        "*:1",
        "münchen:1",
    ],
)
def test_an_entry_of_another_form_is_refused_when_the_server_starts(entry):
    with pytest.raises(ValueError, match="allowed_sessions: expected host:port"):
        sessions.AllowList([entry])


def test_an_empty_list_is_refused_when_the_server_starts():
    with pytest.raises(ValueError, match="allowed_sessions"):
        sessions.AllowList([])


def test_replayed_tool_calls_get_their_index_back():
    tools = [{"function": {"name": "look"}}, {"function": {"name": "write"}}]
    calls = [{"id": str(n), "function": {"name": name}} for n, name in enumerate(["write", "look", "unknown"])]
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [*calls, {"index": 7}]},
    ]
    sessions.restore_tool_call_indices(messages, tools)
    assert [call["index"] for call in messages[1]["tool_calls"]] == [1, 0, -1, 7]
    assert messages[0] == {"role": "user", "content": "x"}
