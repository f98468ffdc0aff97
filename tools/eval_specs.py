"""Write down what swebench can grade, for the data script: repositories, their versions, and the length of its scripts.

    make eval-specs
    <Python that has swebench> tools/eval_specs.py [--check]

1. A version counts if swebench has a command that runs its tests and a parser for what they print: grading one without
   ends in a KeyError.
2. The longest commands are those of the real scripts, for test patches of one file and of fifty, less what
   ``swebench_rows.eval_script_bytes`` counts of the patch itself: so its bound holds for every version.

With --check nothing is written, and the exit status is 1 if the file is not what would be written.
"""

import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

_EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "experimental" / "nemo-gym"
sys.path.insert(0, str(_EXAMPLE))

from swebench_rows import patch_bytes

try:
    from swebench.harness.constants import MAP_REPO_VERSION_TO_SPECS
    from swebench.harness.log_parsers import MAP_REPO_TO_PARSER
    from swebench.harness.test_spec.create_scripts import make_eval_script_list
except ImportError as error:
    sys.exit(f"error: expected a Python with the agent's swebench, found {error}; use make eval-specs")

_OUTPUT = _EXAMPLE / "data" / "eval_specs.json"
_COMMIT = "0" * 40
# wp-calypso has a command of its own for a test file in client/, for one in test/e2e, and for every other.
_TEST_FILES = [
    [f"{folder}/{number}.py" for number in range(count)]
    for folder in ("client", "test/e2e", "tests")
    for count in (1, 50)
]


def main() -> int:
    text = _as_text(_eval_specs())
    if "--check" in sys.argv[1:]:
        is_same = _OUTPUT.read_text() == text
        print(f"{_OUTPUT.name} {'is' if is_same else 'is NOT'} that of the installed swebench")
        return 0 if is_same else 1
    temporary = _OUTPUT.with_suffix(".new")
    temporary.write_text(text)
    temporary.replace(_OUTPUT)
    print(f"wrote {_OUTPUT}")
    return 0


def _eval_specs() -> dict[str, Any]:
    specs = {
        repo: {name: spec for name, spec in versions.items() if "test_cmd" in spec}
        for repo, versions in MAP_REPO_VERSION_TO_SPECS.items()
        if repo in MAP_REPO_TO_PARSER
    }
    longest = max(
        _commands_bytes(repo, name, spec, files)
        for repo, versions in specs.items()
        for name, spec in versions.items()
        for files in _TEST_FILES
    )
    return {
        "grader": f"swebench {version('swebench')}",
        "longest_commands_bytes": longest,
        "versions": {repo: sorted(versions) for repo, versions in sorted(specs.items()) if versions},
    }


def _commands_bytes(repo: str, name: str, spec: dict[str, Any], files: list[str]) -> int:
    test_patch = "".join(
        f"diff --git a/{file} b/{file}\n--- a/{file}\n+++ b/{file}\n@@ -1 +1 @@\n-a\n+b\n" for file in files
    )
    instance = {"repo": repo, "version": name, "test_patch": test_patch, "base_commit": _COMMIT}
    lines = make_eval_script_list(instance, spec, "testbed", "/testbed", _COMMIT, test_patch)
    # The frame is that of TestSpec.eval_script.
    script = "\n".join(["#!/bin/bash", "set -uxo pipefail", *lines]) + "\n"
    return len(script.encode()) - patch_bytes(instance)


def _as_text(specs: dict[str, Any]) -> str:
    """JSON with a line for each repository, so that a new release of swebench is a readable change."""
    repositories = ",\n".join(
        f"  {json.dumps(repo)}: {json.dumps(names)}" for repo, names in specs["versions"].items()
    )
    head = {key: value for key, value in specs.items() if key != "versions"}
    return json.dumps(head, indent=1)[:-2] + ',\n "versions": {\n' + repositories + "\n }\n}\n"


if __name__ == "__main__":
    sys.exit(main())
