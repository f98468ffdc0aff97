"""Run commands in sandboxes side by side: a JSON request on stdin, the results of each command on stdout.

Runs in NeMo Gym's environment, which has the provider; the tests run in the project's.
"""

import asyncio
import json
import os
import sys

import uvloop
from nemo_gym.sandbox.providers.base import SandboxSpec
from nemo_gym_bubblewrap.provider import BubblewrapProvider


async def main() -> None:
    request = json.load(sys.stdin)
    provider = BubblewrapProvider(request["image_root"], **request["provider"])
    spec = SandboxSpec(image=request["image"])
    sandboxes = [await provider.create(spec) for _ in request["sandboxes"]]

    async def run(sandbox, commands: list[str]) -> list[dict]:
        results = []
        for command in commands:
            result = await provider.exec(sandbox, command, timeout_s=request["timeout_s"], user="root")
            results.append({**vars(result)})
        return results

    try:
        print(json.dumps(await asyncio.gather(*map(run, sandboxes, request["sandboxes"]))))
    finally:
        for sandbox in sandboxes:
            await provider.close(sandbox)


# As in NeMo Gym's workers: files that children may inherit, and an event loop that lets them.
os.set_inheritable(os.open("/etc/hostname", os.O_RDONLY), True)
uvloop.run(main())
