# wrong: (line 16). Does every rank reach the same barriers?
from pathlib import Path

from accelerate import PartialState


def run(state: PartialState, actions) -> tuple[Path, int]:
    with state.main_process_first():
        folder = actions.open_run()
    if state.is_local_main_process:
        actions.download()
    with state.local_main_process_first():
        samples = actions.prepare()
    if state.is_main_process:
        state.wait_for_everyone()
    correct = actions.evaluate(samples)
    if state.is_main_process:
        actions.save(folder, correct)
    state.wait_for_everyone()
    if state.is_local_main_process:
        actions.clean_up()
    return folder, correct
