"""The data script turns a SWE-bench instance into a prompt row; it is replaced, with this test, by the next change."""

import json

import download_and_process_data


def test_an_instance_becomes_a_prompt_row(tmp_path):
    instance = {"instance_id": "a__b-1", "repo": "a/b", "problem_statement": "It fails.", "patch": "diff"}
    source, target = tmp_path / "instances.jsonl", tmp_path / "prompts.jsonl"
    source.write_text(f"{json.dumps(instance)}\n")

    download_and_process_data.convert_to_miles_format(str(source), str(target), split="test", subset="verified")

    row = json.loads(target.read_text())
    assert row == {"prompt": "It fails.", "metadata": {**instance, "subset": "verified", "split": "test"}}
