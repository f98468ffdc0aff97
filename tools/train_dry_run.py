"""Show what ``make train`` would run: every command, train.py's options and the job's environment, with nothing started.

    python tools/train_dry_run.py <checkout of Miles> [options of the launcher]

1. The launcher's ``prepare`` and ``execute`` run as they are, through the ``command_utils`` of the checkout.
2. Two modules of Miles are replaced before it is imported, because they import ray and httpx: ``exec_command``, its
   whole shell layer, by one that notes each command; ``http_utils``, of which it takes a wait for servers that the
   launcher never starts, by a stub that raises. So a Python with what the launcher itself imports is enough.
3. From then on this process can start no program at all: Python's audit hook refuses it.
4. Values of secrets are masked: options and variables named like a key, token, secret or password, and those values
   wherever else they appear; so is what stands before the @ of a URL.

NCCL_NVLS_ENABLE is probed when the job starts; here the probe finds nothing. Exit status: 2 where Miles is missing.
"""

import contextlib
import importlib.util
import io
import json
import os
import re
import shlex
import sys
import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

import typer

_LAUNCHER = Path(__file__).resolve().parents[1] / "examples/experimental/nemo-gym/run.py"
_UTILS = "miles.utils.external_utils.command_utils"
_SHELL = "miles.utils.external_utils.exec_command"
_HTTP = "miles.utils.http_utils"

_STARTS_A_PROGRAM = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "pty.spawn")
_SECRET_WORD = "(?:api)?(?:key|token|secret|password|passwd|credential)s?"
_SECRET = re.compile(rf"(?:^|[-_]){_SECRET_WORD}(?:$|[-_])", re.IGNORECASE)
# Of an option it has to be the last word: --moe-token-dispatcher-type is none.
_SECRET_OPTION = re.compile(rf"--(?:.*[-_])?{_SECRET_WORD}", re.IGNORECASE)
_DATA_COLUMN = re.compile(r"--(?:eval-)?(?:input|label|metadata|reward|tool)-key")
_NUMBER = re.compile(r"[0-9.e+-]+")
_MASK = "***"
_SHORTEST_MASKED = 6


def main() -> int:
    checkout = _checked_checkout(sys.argv[1] if len(sys.argv) > 1 else "")
    commands = _install_recorder(checkout)
    launcher = _import_launcher()
    shown = io.StringIO()
    try:
        # Miles prints the launcher's fields and its own notes, secrets in clear.
        with contextlib.redirect_stdout(shown):
            _run_launcher(launcher, sys.argv[2:])
    except SystemExit as end:
        if end.code:
            return int(end.code)
    if not commands:  # --help
        print(shown.getvalue())
        return 0
    print(f"# Miles {_commit(checkout)}; nothing was started")
    for line in masked(report(commands), secrets=_secrets(commands)):
        print(line)
    return 0


# --- Miles ----------------------------------------------------------------------


def _checked_checkout(text: str) -> Path:
    path = Path(text).expanduser().absolute()
    if text and (path / f"{_UTILS.replace('.', '/')}.py").is_file():
        return path
    found = f"{path} without {_UTILS.replace('.', '/')}.py" if text else "none"
    _fail(
        f"expected a checkout of Miles, found {found}; "
        "`git clone https://github.com/radixark/miles <folder>`, then make train-dry-run MILES=<folder>"
    )


def _install_recorder(checkout: Path) -> list[str]:
    """Put the checkout's ``command_utils`` in place with its shell layer recorded; return the list it appends to."""
    commands: list[str] = []

    def record(cmd: str, capture_output: bool = False, **kwargs: Any) -> str | None:
        commands.append(cmd)
        return "0" if capture_output else None

    def record_multi_node(cmd: str, capture_output: bool = False, **kwargs: Any) -> list[str | None]:
        return [record(cmd, capture_output)]

    def wait_for_server_ready(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError("the launcher waits for a server, and in a dry run none is started")

    shell = {"exec_command_cpu": record, "exec_command_gpu": record, "exec_command_multi_node": record_multi_node}
    sys.modules[_SHELL] = _module(_SHELL, **shell)
    sys.modules[_HTTP] = _module(_HTTP, wait_for_server_ready=wait_for_server_ready)
    sys.path.insert(0, str(checkout))
    sys.addaudithook(_refuse_programs)
    try:
        utils = importlib.import_module(_UTILS)
    except Exception as error:
        _fail(
            f"expected to import {_UTILS} from {checkout}, found {type(error).__name__}: {error}; "
            "use a checkout of current main, and a Python that Miles supports (3.10 or newer)"
        )
    if any(getattr(utils, name, None) is not function for name, function in shell.items()):
        _fail(f"expected {_UTILS} of {checkout} to take its shell from {_SHELL}; use a checkout of current main")
    return commands


def _module(name: str, **members: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(members)
    return module


def _refuse_programs(event: str, args: tuple) -> None:
    if event in _STARTS_A_PROGRAM:
        raise RuntimeError(f"the launcher reaches past command_utils: {event} {args[:2]!r}")


def _commit(checkout: Path) -> str:
    """The commit that is checked out, read without git."""
    git = checkout / ".git"
    with contextlib.suppress(OSError):
        head = (git / "HEAD").read_text().strip()
        reference = head.removeprefix("ref: ")
        if reference == head:
            return head[:12]
        if (git / reference).is_file():
            return (git / reference).read_text().strip()[:12]
        for line in (git / "packed-refs").read_text().splitlines():
            if line.endswith(f" {reference}"):
                return line[:12]
    return "of an unknown commit"


# --- the launcher ---------------------------------------------------------------


def _import_launcher() -> types.ModuleType:
    sys.path.insert(0, str(_LAUNCHER.parent))
    spec = importlib.util.spec_from_file_location("nemogym_launcher", _LAUNCHER)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _run_launcher(launcher: types.ModuleType, options: list[str]) -> None:
    """As its ``main``, without the checks of this machine and of the agent server."""

    def record(args: launcher.ScriptArgs) -> None:
        if not args.skip_prepare:
            launcher.prepare(args)
        launcher.execute(args)

    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(launcher.U.dataclass_cli(record))
    app(args=options, prog_name="run.py")


# --- what is printed ------------------------------------------------------------


def report(commands: Iterable[str]) -> list[str]:
    """One line a command; the job's submission as its environment and its options, one a line."""
    lines: list[str] = []
    for command in commands:
        job = _parse_submission(command)
        if job is None:
            lines.append(f"$ {command}")
            continue
        script, environment, options = job
        lines += ["", "# environment of the job"]
        lines += [f"{name}={value}" for name, value in sorted(environment.items())]
        lines += ["", f"# {script}", *options]
    return lines


def _parse_submission(command: str) -> tuple[str, dict[str, str], list[str]] | None:
    words = shlex.split(command)
    prefix = "--runtime-env-json="
    runtime_env = [word.removeprefix(prefix) for word in words if word.startswith(prefix)]
    if not runtime_env:
        return None
    script, *options = words[words.index("--") + 2 :]
    return script, json.loads(runtime_env[0])["env_vars"], _one_a_line(options)


def _one_a_line(words: list[str]) -> list[str]:
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(word if word.startswith("--") else shlex.quote(word))
        else:
            lines[-1] += f" {shlex.quote(word)}"
    return lines


def masked(lines: Iterable[str], *, secrets: Iterable[str]) -> list[str]:
    """The lines with every secret value masked, and what stands before the @ of a URL."""
    longest_first = sorted({secret for secret in secrets if len(secret) >= _SHORTEST_MASKED}, key=len, reverse=True)
    return [_masked_line(line, longest_first) for line in lines]


def _masked_line(line: str, secrets: list[str]) -> str:
    name, separator, value = re.match(r"([^\s=]*)([\s=]?)(.*)", line, re.DOTALL).groups()
    if _names_a_secret(name) and not (name.startswith("--") and _NUMBER.fullmatch(value)):
        return f"{name}{separator}{_MASK if value else ''}"
    for secret in secrets:
        line = line.replace(secret, _MASK)
    return re.sub(r"//[^/@\s]*@", f"//{_MASK}@", line)


def _names_a_secret(name: str) -> bool:
    if name.startswith("--"):
        return bool(_SECRET_OPTION.fullmatch(name)) and not _DATA_COLUMN.fullmatch(name)
    return bool(_SECRET.search(name))


def _secrets(commands: Iterable[str]) -> list[str]:
    """Values of this process's and the job's variables that are named like a secret."""
    variables = list(os.environ.items())
    for command in commands:
        job = _parse_submission(command)
        if job is not None:
            variables += job[1].items()
    return [str(value) for name, value in variables if _SECRET.search(name)]


def _fail(message: str) -> NoReturn:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    sys.exit(main())
