"""A file that is written whole or not at all."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from row_reader import DataError


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """A new file that takes the place of ``path`` at the end, or leaves no trace when the block raises.

    Args:
        path: what ``--output`` named; folders that are missing are made. A link stays, and what it names is replaced.

    Raises:
        DataError: it cannot be written, or is a device, a pipe or a folder.
    """
    # Asked of the name as it is given: that of a pipe, /dev/stdout, resolves to a path that does not exist.
    if os.path.exists(path) and not os.path.isfile(path):
        raise DataError(f"expected --output to be a file, found {path}, which is none")
    target = Path(os.path.realpath(path))
    new_folders = [folder for folder in target.parents if not os.path.exists(folder)]
    temporary: str | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside it: os.replace is atomic only within one file system.
        descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
        with open(descriptor, "w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        if temporary:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
        with suppress(OSError):
            for folder in new_folders:
                folder.rmdir()
        if isinstance(error, OSError):
            raise DataError(f"expected to write --output {path}, found: {error.strerror}") from None
        raise
