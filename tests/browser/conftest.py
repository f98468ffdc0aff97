"""The example on sys.path, one browser for all tests, and pages of reports made once."""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fast.examples.experimental.nemo_gym import EXAMPLE_DIR

if str(EXAMPLE_DIR) not in sys.path:
    sys.path.insert(0, str(EXAMPLE_DIR))

from tests.browser.chromium import Browser, BrowserError, Page, find_chromium


def pytest_sessionstart() -> None:
    try:
        find_chromium()
    except BrowserError as error:
        pytest.exit(str(error), returncode=2)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    browser = Browser()
    yield browser
    browser.close()


def make_report(output: Path, *inputs: Path) -> Path:
    """The report of ``inputs``, made as its user does."""
    command = [sys.executable, str(EXAMPLE_DIR / "report.py"), *map(str, inputs), "-o", str(output)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
    return output


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a file in a page of its own; at the end no page may have complained or asked anybody for anything."""
    pages = []

    def _open(path: Path, **screen: int | bool) -> Page:
        page = browser.page(**screen)
        pages.append(page)
        page.open(path)
        return page

    yield _open
    for page in pages:
        page.run("0")  # what was said before it has come by now
        assert page.errors == [] and page.requests == []
        page.call("Page.close")
