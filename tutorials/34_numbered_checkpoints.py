"""Save numbered checkpoints, resume, save again, and see which one a third run resumes from.

python tutorials/34_numbered_checkpoints.py
"""

import logging
import tempfile
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import ProjectConfiguration

from accel_demo.show import table

logging.disable(logging.WARNING)  # "Deleting 1 checkpoints to make room for new checkpoint."


def new_run(folder: Path, total_limit: int | None) -> tuple[Accelerator, torch.nn.Linear]:
    """Return an Accelerator, as in a new process, and a model that consists of one weight."""
    AcceleratorState._reset_state(reset_partial_state=True)
    project = ProjectConfiguration(
        str(folder), automatic_checkpoint_naming=True, total_limit=total_limit
    )
    accelerator = Accelerator(cpu=True, project_config=project)
    return accelerator, accelerator.prepare(torch.nn.Linear(1, 1, bias=False))


def save(accelerator: Accelerator, model: torch.nn.Linear, number: int) -> None:
    torch.nn.init.constant_(model.weight, number)  # so that we recognize the checkpoint
    accelerator.save_state()


def numbers(folder: Path) -> list[int]:
    return sorted(int(path.name.split("_")[1]) for path in (folder / "checkpoints").iterdir())


def resumed_from(folder: Path, total_limit: int | None, sets_iteration: bool) -> list:
    """Save three times, resume, save twice, and resume again. Return a row of the table."""
    accelerator, model = new_run(folder, total_limit)
    for number in (1, 2, 3):
        save(accelerator, model, number)
    accelerator, model = new_run(folder, total_limit)
    accelerator.load_state()
    if sets_iteration:
        accelerator.project_configuration.iteration = numbers(folder)[-1] + 1
    iteration = accelerator.project_configuration.iteration
    try:
        for number in (4, 5):
            save(accelerator, model, number)
        names = ", ".join(f"`checkpoint_{number}`" for number in numbers(folder))
    except ValueError as error:
        names = f"`ValueError`: … {str(error).split(') ')[1].split('.')[0]}"
    accelerator, model = new_run(folder, total_limit)
    accelerator.load_state()
    return [total_limit, iteration, names, int(model.weight)]


def main() -> None:
    rows = []
    for case in ((None, False), (2, False), (2, True)):
        with tempfile.TemporaryDirectory() as folder:
            rows.append(resumed_from(Path(folder), *case))
    heading = ["`total_limit`", "`iteration` in run 2", "after saves 4 and 5", "run 3 loads save"]
    print(table(heading, rows))


if __name__ == "__main__":
    main()
