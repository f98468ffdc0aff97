"""Where the local stack keeps its files, and the versions that it is made of."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).resolve().parent

# NeMo Gym, mini-swe-agent and swebench are pinned in requirements.in, their closure in requirements.txt.
GYM_REQUIREMENTS = SOURCE / "requirements.txt"
GYM_PYTHON = (3, 13, 14)  # nemo-gym 0.7.0 declares Requires-Python >=3.13.14; ray has no wheel for 3.14
TASK_RECIPE = SOURCE / "tasks.toml"


class StackError(Exception):
    """The local stack cannot do what was asked; the message says what was found and what to do."""


@dataclass(frozen=True)
class Paths:
    """Files of the local stack below one folder.

    Args:
        root: the folder, absolute.
    """

    root: Path

    @classmethod
    def from_environment(cls) -> "Paths":
        """Use LOCAL_STACK_DIR, or a folder of the user's cache (XDG_CACHE_HOME, ~/.cache).

        Raises:
            StackError: NeMo Gym could not run from there.
        """
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        root = Path(os.environ.get("LOCAL_STACK_DIR") or cache / "miles-nemo-gym").absolute()
        # Ray starts its workers through a shell and does not quote the interpreter's path.
        if shlex.quote(str(root)) != str(root):
            raise StackError(
                f"NeMo Gym cannot run from {str(root)!r}: expected a path without spaces and other characters that a shell "
                "treats specially; choose one with LOCAL_STACK_DIR=<folder>"
            )
        return cls(root)

    @property
    def gym(self) -> Path:
        """NeMo Gym's virtual environment."""
        return self.root / "gym"

    @property
    def gym_python(self) -> Path:
        """Its interpreter."""
        return self.gym / "bin" / "python"

    @property
    def site_packages(self) -> Path:
        """Where NeMo Gym itself is."""
        return next((self.gym / "lib").glob("python3.*/site-packages"))

    @property
    def images(self) -> Path:
        """Sandbox images, one a task."""
        return self.root / "images"

    @property
    def tasks(self) -> Path:
        """The tasks as Miles prompt data, JSONL."""
        return self.root / "tasks.jsonl"

    @property
    def logs(self) -> Path:
        """NeMo Gym's output, one file a run."""
        return self.root / "logs"

    @property
    def runs(self) -> Path:
        """Working folders of the runs that are alive."""
        return self.root / "runs"
