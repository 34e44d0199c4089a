"""Our answer to exercise 44."""

from pathlib import Path

from accelerate import PartialState


def run(state: PartialState, actions) -> tuple[Path, int]:
    with state.main_process_first():  # the others find the folder
        folder = actions.open_run()
    if state.is_local_main_process:
        actions.download()
    with state.local_main_process_first():  # after its download, while the others wait
        samples = actions.prepare()
    correct = actions.evaluate(samples)
    if state.is_main_process:
        actions.save(folder, correct)
    state.wait_for_everyone()  # the checkpoint is complete, and all mistakes are written
    if state.is_local_main_process:
        actions.clean_up()
    return folder, correct
