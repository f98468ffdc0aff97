"""The table of NeMo Gym's agents in the docs says of those, and only those, that the tests run them that they were run."""

import importlib

import pytest

from tests.agent_table import EXAMPLE_DIR, agents_by_reach, agents_run


@pytest.fixture
def environments(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE_DIR))
    return importlib.import_module("local_stack.environments").ENVIRONMENTS


def test_the_agents_run_are_those_of_the_local_stack(environments):
    assert agents_run() == {"mini_swe_agent_2", *(environment.agent_type for environment in environments.values())}


def test_no_agent_is_there_twice_and_none_is_run_that_is_not_there():
    named = [agent for agents in agents_by_reach() for agent in agents]
    assert len(named) == len(set(named))
    assert agents_run() <= set(named)
