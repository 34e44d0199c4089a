# wrong: latest(folder) returns step 6 with only 0 of the 20,000 bytes of model.bin

import json
from pathlib import Path


def save(folder: Path, step: int, files: dict[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    (folder / "manifest.json").write_text(json.dumps([step, sorted(files)]))


def latest(folder: Path) -> tuple[int, dict[str, bytes]] | None:
    if not (folder / "manifest.json").exists():
        return None
    step, names = json.loads((folder / "manifest.json").read_text())
    return step, {name: (folder / name).read_bytes() for name in names}
