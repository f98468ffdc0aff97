"""make train-dry-run: prints what would run, starts nothing, shows no secret."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STAND_IN = ROOT / "tests/fast/examples/experimental/nemo_gym/stand_in"
UTILS = "miles/utils/external_utils/command_utils.py"


def dry_run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "examples/experimental/nemo-gym"), **variables}
    command = [sys.executable, ROOT / "tools/train_dry_run.py", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    return Path(shutil.copytree(STAND_IN, tmp_path / "miles", ignore=shutil.ignore_patterns("__pycache__")))


def test_prints_commands_environment_and_options_one_a_line():
    ended = dry_run(STAND_IN, "--num-rollout", "7", NEMO_GYM_URL="http://gym:12000")
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    assert lines[0].startswith("# Miles ")
    assert "$ mkdir -p /root/models /root/datasets" in lines
    assert "NEMO_GYM_URL=http://gym:12000" in lines
    assert lines.index("NEMO_GYM_URL=http://gym:12000") < lines.index("--num-rollout 7")
    assert {"--use-session-server", "--input-key prompt", "--max-tokens-per-gpu 16384"} <= set(lines)


def test_an_option_that_only_speaks_of_tokens_is_no_secret():
    given = "--moe-token-dispatcher-type alltoall --metadata-key metadata --my-token hidden1 --tokens-key hidden2"
    lines = dry_run(STAND_IN, "--extra-args", given).stdout.splitlines()
    assert {"--moe-token-dispatcher-type alltoall", "--metadata-key metadata", "--my-token ***"} <= set(lines)
    assert "--tokens-key ***" in lines


def test_needs_no_python_path_of_the_users():
    assert dry_run(STAND_IN, PYTHONPATH="").returncode == 0


def test_masks_secrets():
    extra = "--sglang-api-key=topsecret1 --router-oracle-password 'two words' --max-tokens-to-oom 4"
    ended = dry_run(
        STAND_IN,
        *("--extra-args", f"{extra} --wandb-dir /logs/wandbsecret"),
        WANDB_API_KEY="wandbsecret",
        NEMO_GYM_URL="http://user:pw@gym:12000",
    )
    lines = ended.stdout.splitlines()
    expected = ["--wandb-key ***", "--sglang-api-key=***", "--router-oracle-password ***", "--wandb-dir /logs/***"]
    assert {*expected, "--max-tokens-to-oom 4", "NEMO_GYM_URL=http://***@gym:12000"} <= set(lines)
    assert not re.search("wandbsecret|topsecret1|two words|pw@", ended.stdout + ended.stderr)


def test_no_program_can_be_started(checkout, tmp_path):
    utils = checkout / UTILS
    source = utils.read_text()
    for number, start in enumerate(("subprocess.run(['touch', {0!r}])", "os.system('touch {0}')")):
        marker = str(tmp_path / f"started{number}")
        utils.write_text(f"{source}\n    import subprocess\n    {start.format(marker)}\n")
        ended = dry_run(checkout)
        assert ended.returncode != 0
        assert "reaches past command_utils" in ended.stderr
        assert not Path(marker).exists()


@pytest.mark.parametrize("arguments", [(), ("",), ("/nowhere",)])
def test_without_a_checkout_one_sentence(arguments):
    ended = dry_run(*arguments)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert re.fullmatch(r"error: expected a checkout of Miles, found .*git clone .* MILES=<folder>\n", ended.stderr)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("def exec_command_cpu(cmd): raise SystemExit('started')", "to take its shell from"),
    ],
)
def test_a_checkout_that_cannot_be_used_is_refused(checkout, source, message):
    (checkout / UTILS).write_text(source)
    ended = dry_run(checkout)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_wrong_option_is_named():
    ended = dry_run(STAND_IN, "--num-rolout", "7")
    assert ended.returncode == 2
    assert "--num-rolout" in ended.stderr
