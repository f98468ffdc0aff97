"""A headless Chromium, steered over a pipe by the DevTools protocol: no port, no driver, no package.

The binary is the one that CHROMIUM names, else Debian's or Google's where it is installed.
https://chromedevtools.github.io/devtools-protocol/
"""

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

BINARIES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
_TIMEOUT_S = 60.0


class BrowserError(Exception):
    """The browser is not there, or did not do what it was told."""


def find_chromium() -> str:
    """Path of the binary.

    Raises:
        BrowserError: there is none.
    """
    named = os.environ.get("CHROMIUM")
    found = shutil.which(named) if named else next(filter(None, map(shutil.which, BINARIES)), None)
    if not found:
        raise BrowserError(
            f"expected a Chromium{f' at CHROMIUM={named}' if named else f' ({BINARIES[0]} or {BINARIES[1]}) on PATH'}, "
            "found none; apt-get install chromium-headless-shell, or CHROMIUM=<path>"
        )
    return found


class Browser:
    """One process with a profile of its own; ``close`` ends it and leaves nothing behind."""

    def __init__(self) -> None:
        self._profile = tempfile.mkdtemp(prefix="report-browser-")
        self._number = 0
        self._pages: dict[str, Page] = {}
        self._rest = b""
        theirs_in, self._to = os.pipe()
        self._from, theirs_out = os.pipe()
        # The browser reads descriptor 3 and writes 4, so that neither pipe may lie there before.
        theirs = [fcntl.fcntl(one, fcntl.F_DUPFD, 10) for one in (theirs_in, theirs_out)]
        command = [find_chromium(), "--headless", "--disable-gpu", "--hide-scrollbars", "--remote-debugging-pipe"]
        command += [f"--user-data-dir={self._profile}", "--no-first-run", "--disable-background-networking"]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        self._process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{theirs[0]} 4>&{theirs[1]}', "bash", *command],
            pass_fds=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for one in (theirs_in, theirs_out, *theirs):
            os.close(one)

    def close(self) -> None:
        os.close(self._to)  # a browser without its pipe ends
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            pass
        finally:
            try:
                os.killpg(self._process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            self._process.wait()
            os.close(self._from)
            shutil.rmtree(self._profile, ignore_errors=True)

    def page(self, *, width: int = 1280, height: int = 900, dark: bool = False) -> "Page":
        """An empty page of that many CSS pixels, light or dark."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        screen = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        page.call("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        return page

    def call(self, method: str, params: dict[str, Any], session: str | None = None) -> dict[str, Any]:
        """Tell the browser something and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params} | (
            {"sessionId": session} if session else {}
        )
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            answer = self._next(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']}")
                return answer["result"]
            self._deliver(answer)

    def wait_for_event(self, page: "Page", method: str) -> dict[str, Any]:
        """Its parameters, also if it has come already since the page last waited for one."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not (found := [one for one in page.events if one["method"] == method]):
            self._deliver(self._next(deadline))
        page.events.clear()
        return found[0]["params"]

    def _deliver(self, message: dict[str, Any]) -> None:
        if page := self._pages.get(message.get("sessionId", "")):
            page.take(message)

    def _next(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(deadline - time.monotonic(), 0))
            data = os.read(self._from, 1 << 20) if ready else b""
            if not data:
                raise BrowserError("the browser has gone" if ready else f"no answer within {_TIMEOUT_S:g} s")
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)


class Page:
    """One tab.

    Attributes:
        errors: what a console would show in red or yellow: exceptions, errors, warnings, refusals by a policy.
        requests: URLs asked for, but for the page itself and what it made itself.
        events: those since one was last waited for.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session
        self._url = ""
        self.errors: list[str] = []
        self.requests: list[str] = []
        self.events: list[dict[str, Any]] = []

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, params, self._session)

    def open(self, path: Path) -> float:
        """Load a file; returns the seconds until all of it had loaded and run, and was laid out."""
        self._url = path.resolve().as_uri()
        self.events.clear()
        start = time.monotonic()
        self.call("Page.navigate", url=self._url)
        self._browser.wait_for_event(self, "Page.loadEventFired")
        self.run("document.body.getBoundingClientRect().height")
        return time.monotonic() - start

    def run(self, script: str) -> Any:
        """The value of an expression, as JSON would hold it; a promise is awaited.

        Raises:
            BrowserError: it throws.
        """
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in answer:
            raise BrowserError(json.dumps(answer["exceptionDetails"])[:2000])
        return answer["result"].get("value")

    def picture(self, path: Path, *, whole: bool = False) -> None:
        """A PNG of what is seen, or of the whole page."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def take(self, message: dict[str, Any]) -> None:
        self.events.append(message)
        method, params = message["method"], message["params"]
        if method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.errors.append(json.dumps(params["args"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.errors.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if url != self._url and not url.startswith(("data:", "blob:")):
                self.requests.append(url)
