# wrong: rank 0's barrier (line 10) was matched with rank 1's (line 13), so rank 1 entered its
from pathlib import Path

from accelerate import PartialState


def run(state: PartialState, actions) -> tuple[Path, int]:
    if state.is_main_process:
        folder = actions.open_run()
        state.wait_for_everyone()
    if state.is_local_main_process:
        actions.download()
    with state.local_main_process_first():
        samples = actions.prepare()
    if not state.is_main_process:
        folder = actions.open_run()
    correct = actions.evaluate(samples)
    if state.is_main_process:
        actions.save(folder, correct)
    state.wait_for_everyone()
    if state.is_local_main_process:
        actions.clean_up()
    return folder, correct
