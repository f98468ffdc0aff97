"""make miles-flags, without Miles: what it takes of a launch, what it says of an option, what it refuses."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests/fast/examples/experimental/nemo_gym/stand_in"

sys.path.insert(0, str(ROOT / "tools"))
import miles_flags


def test_a_launch_is_its_jobs_environment_and_its_words():
    environment, words = miles_flags.record_launch(
        STAND_IN, ["--model-dir", "/models", "--nemo-gym-url", "http://gym:1", "--num-session-servers", "2"]
    )
    assert environment["NEMO_GYM_URL"] == "http://gym:1"
    assert words[words.index("--hf-checkpoint") + 1] == "/models/Qwen3-4B-Instruct-2507"
    assert words[words.index("--session-server-port") + 1 :][:2] == ["30000", "30002"]


def test_every_model_has_its_published_configuration():
    recorded = json.loads(miles_flags._LAUNCHES.read_text())
    assert {"Qwen3-4B-Instruct-2507", *(words[1] for words in recorded.values() if "--model-name" in words)} == set(
        miles_flags._MODEL_CONFIGS
    )


@pytest.mark.parametrize(
    "options, described",
    [
        ({"type": int}, {"type": "int"}),
        ({"action": "store_true"}, {"nargs": "0"}),
        ({"nargs": "+", "type": str}, {"type": "str", "nargs": "+"}),
        ({"choices": {"b", "a"}}, {"choices": ["a", "b"]}),
        ({"nargs": "?", "const": True}, {"nargs": "?"}),
        ({"action": argparse.BooleanOptionalAction}, {"nargs": "0"}),
    ],
)
def test_an_option_in_a_few_words(options, described):
    assert miles_flags.describe(argparse.ArgumentParser().add_argument("--x", **options)) == described


def test_the_parser_that_refuses_is_quoted():
    def parse() -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        parser.add_argument("--known", type=int)
        return parser.parse_args()

    with miles_flags._noted_parsers() as parsers:
        assert miles_flags._refusal(parse, {}, ["--known", "1"]) is None
        assert "--unknown" in miles_flags._refusal(parse, {}, ["--unknown"])
        assert "invalid int value" in miles_flags._refusal(parse, {}, ["--known", "x"])
    assert len(parsers) == 3


def test_launches_are_all_accepted_or_not():
    def parse() -> argparse.Namespace:
        parser = argparse.ArgumentParser()
        parser.add_argument("--known", type=int)
        return parser.parse_args()

    accepted, parser = miles_flags.try_launches({"a": ({}, ["--known", "1"])}, parse)
    assert accepted and "--known" in parser._option_string_actions
    assert not miles_flags.try_launches({"a": ({}, ["--known", "1"]), "b": ({}, ["--odd"])}, parse)[0]


def test_a_parser_that_takes_anything_proves_nothing():
    def parse() -> argparse.Namespace:
        return argparse.ArgumentParser().parse_known_args()[0]

    assert not miles_flags.try_launches({"a": ({}, ["--known", "1"])}, parse)[0]


def test_without_a_checkout_one_sentence(tmp_path):
    command = [sys.executable, ROOT / "tools/miles_flags.py", tmp_path, "--megatron", tmp_path]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: expected a checkout of Miles, found ")
    assert ended.stderr.endswith("make miles-flags MILES=<folder>\n") and ended.stderr.count("\n") == 1
