"""Exercise 44, written from the page and the docstring alone."""

from pathlib import Path

from accelerate import PartialState


def run(state: PartialState, actions) -> tuple[Path, int]:
    with state.main_process_first():  # shared folder: rank 0 creates it, the others find it
        folder = actions.open_run()
    with state.local_main_process_first():  # own disk: one process per node fills it
        if state.is_local_main_process:
            actions.download()
        samples = actions.prepare()
    correct = actions.evaluate(samples)  # has an all-reduce, so every process
    if state.is_main_process:
        actions.save(folder, correct)
    state.wait_for_everyone()  # all mistakes are written, and the checkpoint is complete
    if state.is_local_main_process:
        actions.clean_up()
    return folder, correct
