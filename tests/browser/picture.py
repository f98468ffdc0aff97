"""The picture of a report in the README, of made-up scans: python -m tests.browser.picture docs/images/report.png"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from tests.browser.chromium import Browser
from tests.fast.examples.experimental.nemo_gym import EXAMPLE_DIR
from tests.fast.examples.experimental.nemo_gym.made_scans import make_scans

WIDTH, HEIGHT = 1180, 1180


def main(output: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        scans = make_scans(Path(folder))
        page_file = Path(folder) / "report.html"
        command = [sys.executable, EXAMPLE_DIR / "report.py", scans["golden"], scans["policy-base"], "-o", page_file]
        subprocess.run([str(word) for word in command], check=True)
        browser = Browser()
        try:
            page = browser.page(width=WIDTH, height=HEIGHT)
            page.open(page_file)
            page.picture(output)
        finally:
            browser.close()
    # A page has few colours: a palette takes a third of the bytes.
    Image.open(output).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(output, optimize=True)
    print(f"{output}: {output.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
