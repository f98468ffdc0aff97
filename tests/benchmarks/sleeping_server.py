"""An agent server whose episodes only sleep: ``python -m tests.benchmarks.sleeping_server``.

It prints its port as one line, and ends when its stdin does. ``http://127.0.0.1:<port>/<seconds>`` is the URL of a server
whose episodes take so long. Every answer is the same 100 KB.
"""

import asyncio
import os
import socket
import sys
import threading

from aiohttp import web

from .payloads import graded_answer, task_row

_LARGEST_REQUEST = 1 << 20
_BACKLOG = 16_384


def make_app() -> web.Application:
    """``POST /<seconds>/run`` answers so late; ``GET /most`` tells the largest number at a time since it was last asked."""
    answer = graded_answer(task_row(0))
    episodes = {"now": 0, "most": 0}

    async def run(request: web.Request) -> web.Response:
        await request.read()
        episodes["now"] += 1
        episodes["most"] = max(episodes.values())
        await asyncio.sleep(float(request.match_info["seconds"]))
        episodes["now"] -= 1
        return web.Response(body=answer, content_type="application/json")

    async def most(request: web.Request) -> web.Response:
        most, episodes["most"] = episodes["most"], 0
        return web.json_response(most)

    app = web.Application(client_max_size=_LARGEST_REQUEST)
    app.add_routes([web.post("/{seconds}/run", run), web.get("/most", most)])
    return app


def main() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
        web.run_app(make_app(), sock=listener, backlog=_BACKLOG, print=None, access_log=None)


if __name__ == "__main__":
    main()
