# wrong: latest(folder) returns a mixture: step 6, but model.bin is from a different save

import json
import os
from pathlib import Path


def save(folder: Path, step: int, files: dict[str, bytes]) -> None:
    manifest = json.dumps([step, sorted(files)]).encode()
    for name, content in {**files, "manifest.json": manifest}.items():
        unfinished = folder / f"{name}.unfinished"
        unfinished.write_bytes(content)
        os.replace(unfinished, folder / name)


def latest(folder: Path) -> tuple[int, dict[str, bytes]] | None:
    if not (folder / "manifest.json").exists():
        return None
    step, names = json.loads((folder / "manifest.json").read_text())
    return step, {name: (folder / name).read_bytes() for name in names}
