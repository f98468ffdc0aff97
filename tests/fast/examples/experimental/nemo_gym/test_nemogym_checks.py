"""The decisions of the preflight, from facts alone. What a launch does with them is in test_run."""

import pytest
from nemogym_checks import (
    AgentConfig,
    Canary,
    Settings,
    TaskFile,
    check_agent,
    check_apart,
    check_canary,
    check_session_url,
    check_settings,
    check_tasks,
    check_training,
    find_agent_config,
    read_options,
)
from nemogym_contract import Outcome

SERVER = "http://user:pw@gym:12000"


def wrong(findings: list) -> list[str]:
    assert all(finding.expected and finding.remedy for finding in findings if finding.level != "ok")
    return [str(finding) for finding in findings if finding.level != "ok"]


def levels(findings: list) -> set[str]:
    return {finding.level for finding in findings}


# --- settings ---------------------------------------------------------------------


def test_one_head_server_for_all_or_one_each():
    servers = ("http://a:1", "http://b:2")
    assert Settings(servers).head_url("http://b:2") is None
    assert Settings(servers, ("http://h:1",)).head_url("http://b:2") == "http://h:1"
    assert Settings(servers, ("http://h:1", "http://h:2")).head_url("http://b:2") == "http://h:2"


@pytest.mark.parametrize(
    "fields, name",
    [
        ({"head_urls": ("head",)}, "NEMO_GYM_HEAD_URL"),
        ({"head_urls": ("http://a:1", "http://b:1")}, "NEMO_GYM_HEAD_URL"),
        ({"ungraded": "keep"}, "NEMO_GYM_UNGRADED"),
        ({"external_host": "http://trainer"}, "MILES_ROUTER_EXTERNAL_HOST"),
        ({"external_host": "trainer:30000"}, "MILES_ROUTER_EXTERNAL_HOST"),
    ],
)
def test_a_variable_that_cannot_be_used_is_named(fields, name):
    assert check_settings(Settings()) == []
    (line,) = wrong(check_settings(Settings(**fields)))
    assert line.startswith(f"error    {name}: expected ") and ", found " in line


def test_a_url_that_is_none_shows_no_password():
    (line,) = wrong(check_settings(Settings(head_urls=("ftp://user:secret@gym",))))
    assert "ftp://gym" in line and "secret" not in line


# --- an agent server --------------------------------------------------------------


def config_of(port: int = 12000, **agent) -> dict:
    block = {"port": port, "sandbox_provider": "sandbox", "concurrency": 64, **agent}
    return {
        "policy_api_key": "sk-secret",
        "sandbox": {"docker": {"create": {}}},
        "other": {"responses_api_models": {"openai_model": {"port": 12000}}},
        "mini_swe_agent_2": {"responses_api_agents": {"mini_swe_agent_2": block}},
    }


def test_a_block_is_found_by_its_port_and_has_the_agents_own_defaults():
    agent = find_agent_config(config_of(), port=12000)
    assert agent == AgentConfig(concurrency=64, provider="docker")
    assert (agent.step_timeout, agent.eval_timeout, agent.step_limit, agent.skip_if_exists) == (600, 1800, 250, False)
    assert find_agent_config(config_of(port=12001), port=12000) is None
    assert find_agent_config("text", port=12000) is None
    inline = find_agent_config(config_of(sandbox_provider={"e2b": {}}), port=12000)
    assert inline.provider == "e2b"


def test_what_is_not_resolved_is_not_known():
    agent = find_agent_config(config_of(run_golden="${x}", step_timeout="${y}", step_limit=True), port=12000)
    assert (agent.run_golden, agent.step_timeout, agent.step_limit) == (None, None, None)
    assert wrong(check_agent(SERVER, agent, Settings())) == []


@pytest.mark.parametrize(
    "agent, level, said",
    [
        ({"run_golden": True}, "error", "gold patches"),
        ({"skip_if_exists": True}, "error", "skip_if_exists"),
        ({"eval_timeout": 3001}, "error", "eval_timeout 3001 s = 3601 s, found 3600 s"),
        ({"eval_timeout": 2000}, "warning", "NEMO_GYM_DRAIN_TIMEOUT to be at least"),
        ({"concurrency": 16}, "warning", "NEMO_GYM_MAX_CONCURRENCY=16"),
        ({"sandbox_provider": {"local": {}}}, "error", "/testbed"),
    ],
)
def test_a_server_not_to_train_against(agent, level, said):
    found = find_agent_config(config_of(**agent), port=12000)
    (line,) = wrong(check_agent(SERVER, found, Settings()))
    assert line.startswith(f"{level:<8} agent server http://gym:12000: ") and said in line


@pytest.mark.parametrize("in_flight, fits", [(None, False), (16, True), (17, False), (200, False)])
def test_places_for_what_the_trainer_sends(in_flight, fits):
    agent = AgentConfig(concurrency=16)
    assert (wrong(check_agent(SERVER, agent, Settings(), in_flight=in_flight)) == []) is fits


@pytest.mark.parametrize(
    "url, server, external_host, level",
    [
        ("http://0.0.0.0:30000/s/v1", "http://gym:12000", "", "error"),
        ("http://[::]:30000/s/v1", "http://gym:12000", "", "error"),
        ("http://127.0.0.1:30000/s/v1", "http://gym:12000", "", "warning"),
        ("http://localhost:30000/s/v1", "http://192.0.2.1:12000", "", "warning"),
        ("http://localhost:30000/s/v1", "http://gym:12000", "localhost", "ok"),
        ("http://127.0.0.1:30000/s/v1", "http://localhost:12000", "", "ok"),
        ("http://192.0.2.7:30000/s/v1", "http://gym:12000", "", "ok"),
    ],
)
def test_the_way_back(url, server, external_host, level):
    finding = check_session_url(url, server, external_host=external_host)
    assert finding.level == level
    assert level == "ok" or "MILES_ROUTER_EXTERNAL_HOST" in finding.remedy


# --- tasks --------------------------------------------------------------------------


def test_one_ungradable_task_is_a_warning_and_nothing_else_an_error():
    some = TaskFile("t.jsonl", ids=["a", "b"], ungradable=["line 2: no repo"], first={})
    assert [finding.level for finding in check_tasks(some)] == ["ok", "warning"]
    none = TaskFile("t.jsonl", ids=["a"], ungradable=["line 1: no repo"])
    (line,) = wrong(check_tasks(none))
    assert line.startswith("error") and "line 1: no repo" in line


def test_evaluation_apart_from_training():
    train = TaskFile("train.jsonl", ids=["a", "b"])
    assert levels(check_apart(train, TaskFile("eval.jsonl", ids=["c"]))) == {"ok"}
    (line,) = wrong(check_apart(train, TaskFile("eval.jsonl", ids=["c", "b", "b"])))
    assert "1 of 2 in both, e.g. b" in line


# --- what train.py is told ----------------------------------------------------------

OPTIONS = (
    "--rollout-batch-size 2 --n-samples-per-prompt 4 --global-batch-size 8 --max-seq-len 100 "
    "--sglang-context-length 100 --rollout-max-response-len 50 --sglang-tool-call-parser qwen25 "
    "--dynamic-sampling-filter-path miles.rollout.filter_hub.dynamic_sampling_filters.check_no_aborted"
)


def training(more: str = "", *, settings: Settings | None = None) -> list:
    return check_training(read_options(f"{OPTIONS} {more}".split()), settings or Settings())


def test_the_last_of_an_option_counts():
    options = read_options("--a 1 2 --flag --b=3 --a 4".split())
    assert options == {"--a": ["4"], "--flag": [], "--b": ["3"]}


def test_options_that_fit():
    assert levels(training()) == {"ok"}
    assert levels(training("--global-batch-size 4")) == {"ok"}
    assert levels(training("--dynamic-sampling-filter-path=nemogym_generate.keep_group")) == {"ok"}


@pytest.mark.parametrize(
    "more, level, said",
    [
        ("--global-batch-size 5", "error", "global_batch_size 5"),
        ("--global-batch-size 16", "error", "global_batch_size 16"),
        ("--sglang-tool-call-parser=", "error", "--tool-call-parser"),
        ("--sglang-context-length 101", "error", "100"),
        ("--rollout-max-response-len 100", "error", "--rollout-max-response-len"),
        ("--dynamic-sampling-filter-path", "error", "keep_group"),
        ("--dynamic-sampling-filter-path mine.keep", "warning", "ABORTED"),
    ],
)
def test_options_that_do_not_fit(more, level, said):
    (line,) = wrong(training(more))
    assert line.startswith(level) and said in line


def test_zeros_are_trained_where_they_are_asked_for():
    path = "miles.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    more = f"--dynamic-sampling-filter-path {path}"
    assert levels(training(more)) == {"ok", "error"}
    assert levels(training(more, settings=Settings(ungraded="zero"))) == {"ok"}


# --- one episode --------------------------------------------------------------------


def flown(status: str, *, called: bool = True, said: str | None = None, detail: str = "why") -> Canary:
    return Canary(
        server=SERVER,
        url="http://192.0.2.7:30000/sessions/ab/v1",
        image="image:latest",
        outcome=Outcome(status, 0.0 if status in ("Submitted", "TimeLimitExceeded") else None, detail=detail),
        seconds=7.0,
        called_after=5.0 if called else None,
        said=said,
    )


@pytest.mark.parametrize("status", ["UngradableInstance", "Submitted"])
def test_a_canary_that_flew(status):
    finding = check_canary(flown(status))
    assert finding.level == "ok" and "http://192.0.2.7:30000/sessions/ab/v1" in finding.found
    assert "pw" not in str(finding)


@pytest.mark.parametrize(
    "canary, said",
    [
        (flown("PolicyEndpointError", called=False), "MILES_ROUTER_EXTERNAL_HOST"),
        (flown("TimeLimitExceeded", called=False), "pulling image:latest"),
        (flown("SandboxUnavailable", called=False), "image:latest"),
        (flown("UngradableInstance", called=False), "run_golden"),
        (flown("GoldenServer", called=False), "run_golden"),
        (flown("ServerUnreachable", called=False), "why"),
        (flown("PolicyEndpointError", said="conda: not found"), "conda: not found"),
        (flown("TimeLimitExceeded"), "why"),
        (flown("UnknownError"), "why"),
    ],
)
def test_a_canary_that_did_not(canary, said):
    (line,) = wrong([check_canary(canary)])
    assert line.startswith("error    canary episode on http://gym:12000: ") and said in line
