# wrong: never called prepare
from pathlib import Path

from accelerate import PartialState


def run(state: PartialState, actions) -> tuple[Path, int]:
    with state.main_process_first():
        folder = actions.open_run()
    if state.is_local_main_process:
        actions.download()
    if state.is_local_main_process:
        samples = actions.prepare()
    correct = actions.evaluate(samples)
    if state.is_main_process:
        actions.save(folder, correct)
    state.wait_for_everyone()
    if state.is_local_main_process:
        actions.clean_up()
    return folder, correct
