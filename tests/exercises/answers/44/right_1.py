"""Exercise 44, written from the page and the docstring alone."""

from pathlib import Path

from accelerate import PartialState


def run(state: PartialState, actions) -> tuple[Path, int]:
    # The shared folder: rank 0 creates the run folder, the others find it.
    with state.main_process_first():
        folder = actions.open_run()
    # Each node's disk: one download per node, and the others need it.
    if state.is_local_main_process:
        actions.download()
    state.wait_for_everyone()
    # One process per node builds the cache, the others read it.
    with state.local_main_process_first():
        samples = actions.prepare()
    # An all-reduce: every process.
    correct = actions.evaluate(samples)
    if state.is_main_process:
        actions.save(folder, correct)
    # The checkpoint is complete, and all mistakes are written.
    state.wait_for_everyone()
    if state.is_local_main_process:
        actions.clean_up()
    return folder, correct
