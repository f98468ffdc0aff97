"""The least that makes Miles prompt data of rows: ``python bare_loop.py <input> <output>``. It checks nothing."""

import json
import sys

IMAGE = "docker.io/swebench/sweb.eval.x86_64."

with open(sys.argv[1]) as rows, open(sys.argv[2], "w") as prompts:
    for line in rows:
        row = json.loads(line)
        row["image_name"] = f"{IMAGE}{row['instance_id'].replace('__', '_1776_')}:latest"
        prompts.write(json.dumps({"prompt": row["problem_statement"], "metadata": row}) + "\n")
