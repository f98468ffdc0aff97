"""What goes over the wire in the benchmarks: a task of 20 KB up, an answer of 100 KB down, both of real shape. Pure.

The answer is what ``responses_api_agents/mini_swe_agent_2`` sends for a graded episode: a transcript of tool calls and
their outputs, and the report of the tests with the patch.
"""

import json
from typing import Any

REQUEST_BYTES, ANSWER_BYTES = 20_000, 100_000

_GROUP = 8
_OUTPUT_BYTES = 4_000
_LINE = "    def _deserialize(self, value, attr, data):  # as it was before\n"
_DIFF = "diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n@@ -1,400 +1,400 @@\n"


def task_row(index: int, *, size: int = REQUEST_BYTES) -> dict[str, Any]:
    """A SWE-bench row of about ``size`` bytes as JSON; eight in a row are of one task, as in a group of samples.

    Args:
        index: number of the sample.
        size: bytes of the row as JSON.
    """
    tests = [f"tests/test_deserialization.py::TestFields::test_field_{number}" for number in range(size // 250)]
    share = (size - len(json.dumps(json.dumps(tests))) - 700) // 4
    return {
        "repo": "marshmallow-code/marshmallow",
        "instance_id": f"marshmallow-code__marshmallow-{index // _GROUP}",
        "version": "3.0",
        "base_commit": "8b3a32614fd4a74e93e9a63a042e74c1fea34466",
        "environment_setup_commit": "8b3a32614fd4a74e93e9a63a042e74c1fea34466",
        "created_at": "2019-07-14T15:22:39Z",
        "problem_statement": _text(_LINE, 2 * share),
        "hints_text": "",
        "patch": _diff("src/marshmallow/fields.py", share),
        "test_patch": _diff("tests/test_deserialization.py", share),
        "FAIL_TO_PASS": json.dumps(tests[:2]),
        "PASS_TO_PASS": json.dumps(tests[2:]),
        "subset": "verified",
        "split": "test",
    }


def graded_answer(row: dict[str, Any], *, size: int = ANSWER_BYTES) -> bytes:
    """The agent server's answer of about ``size`` bytes to an episode of ``row`` that was solved."""
    status = {name: {"success": json.loads(row[name]), "failure": []} for name in ("FAIL_TO_PASS", "PASS_TO_PASS")}
    report = {row["instance_id"]: {"patch_exists": True, "resolved": True, "tests_status": status}}
    answer = {
        "responses_create_params": {"input": [], "temperature": 1.0},
        "response": {"id": "resp_0", "model": "model", "object": "response", "output": []},
        "reward": 1.0,
        "metadata": {"model_patch": row["patch"], "eval_report": report},
    }
    turn = _turn(0)
    for number in range((size - len(json.dumps(answer))) // len(json.dumps(turn)[1:])):
        answer["response"]["output"] += _turn(number)
    return json.dumps(answer).encode()


def _turn(number: int) -> list[dict[str, Any]]:
    call = {"type": "function_call", "call_id": f"call_{number}", "name": "bash", "status": "completed"}
    return [
        {**call, "arguments": json.dumps({"command": "sed -n 1,80p src/marshmallow/fields.py"})},
        {"type": "function_call_output", "call_id": f"call_{number}", "output": _text(_LINE, _OUTPUT_BYTES)},
    ]


def _diff(path: str, size: int) -> str:
    header = _DIFF.format(path=path)
    return header + _text("-" + _LINE, size - len(header))


def _text(piece: str, size: int) -> str:
    return (piece * (size // len(piece) + 1))[: max(size, 0)]
