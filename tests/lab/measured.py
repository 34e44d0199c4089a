"""Run a command that measures something, and read the files that it writes."""

import json
from pathlib import Path
from types import SimpleNamespace

from tests.conftest import run_to_end


def run_measured(
    folder: Path, command: str, *flags, timeout: float = 240, **environment
) -> SimpleNamespace:
    """Run `accel-demo COMMAND` with `flags`, `--json` and `--plot`, and assert that it succeeds.

    Returns its `stdout` and `stderr`, the contents of the JSON file as `json`, and the SVG file as
    `picture`.
    """
    files = ["--json", folder / "result.json", "--plot", folder / "drawn.svg"]
    words = ["accel-demo", *command.split(), *flags, *files]
    ended = run_to_end(words, timeout=timeout, **environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    result = json.loads((folder / "result.json").read_text())
    assert result["command"] == command.split()[0]
    picture = (folder / "drawn.svg").read_text()
    return SimpleNamespace(stdout=ended.stdout, stderr=ended.stderr, json=result, picture=picture)
