"""Notice changes of existing files that the observer has not seen.

Libraries may write files in C, and the script may start other programs that do.
"""

import os
from dataclasses import dataclass
from pathlib import Path

MOST_FILES = 20_000
NOT_DATA = {"__pycache__", "site-packages", "node_modules"}  # folders


@dataclass
class FolderState:
    """Size and time of the last change of the files in a folder and its subfolders.

    Hidden folders and links are left out. `is_complete` is False if there are too many files.
    """

    files: dict[str, tuple[int, int] | None]
    is_complete: bool = True

    @classmethod
    def of(cls, folder: str, own_folder: Path, outputs: list[list[int]]) -> "FolderState":
        """Return the current state of a folder.

        Files in `own_folder` are left out, and those with a device and inode in `outputs`.
        """
        state = cls({})
        for where, folders, names in os.walk(folder):
            folders[:] = [
                each
                for each in folders
                if each[0] != "." and each not in NOT_DATA and Path(where, each) != own_folder
            ]
            for path in (os.path.join(where, name) for name in names):
                if not os.path.islink(path) and _identity(path) not in outputs:
                    state.files[path] = _state(path)
            if len(state.files) > MOST_FILES:
                state.is_complete = False
                break
        return state

    def changed(self) -> list[str]:
        """Return the files that have another state now, or do not exist anymore."""
        return [path for path, state in self.files.items() if _state(path) != state]


def _state(path: str) -> tuple[int, int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns


def _identity(path: str) -> list[int] | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return [status.st_dev, status.st_ino]
