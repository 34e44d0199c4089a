# wrong: on the same node is still in evaluate
from pathlib import Path

from accelerate import PartialState


def run(state: PartialState, actions) -> tuple[Path, int]:
    with state.main_process_first():
        folder = actions.open_run()
    if state.is_local_main_process:
        actions.download()
    with state.local_main_process_first():
        samples = actions.prepare()
    correct = actions.evaluate(samples)
    if state.is_main_process:
        actions.save(folder, correct)
    if state.is_local_main_process:
        actions.clean_up()
    state.wait_for_everyone()
    return folder, correct
