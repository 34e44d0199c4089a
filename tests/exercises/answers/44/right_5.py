"""Exercise 44, with explicit waits instead of the context managers."""

from pathlib import Path

from accelerate import PartialState


def run(state: PartialState, actions) -> tuple[Path, int]:
    is_first_here = state.local_process_index == 0
    if state.process_index == 0:
        folder = actions.open_run()
    if is_first_here:
        actions.download()
        samples = actions.prepare()
    state.wait_for_everyone()
    if state.process_index != 0:
        folder = actions.open_run()
    if not is_first_here:
        samples = actions.prepare()
    correct = actions.evaluate(samples)
    state.wait_for_everyone()
    if is_first_here:
        actions.clean_up()
    if state.process_index == 0:
        actions.save(folder, correct)
    state.wait_for_everyone()
    return folder, correct
