# wrong: returns None instead of the run's folder and the number of correct predictions
from pathlib import Path

from accelerate import PartialState


def run(state: PartialState, actions) -> tuple[Path, int] | None:
    with state.main_process_first():
        folder = actions.open_run()
    if state.is_local_main_process:
        actions.download()
    with state.local_main_process_first():
        samples = actions.prepare()
    correct = actions.evaluate(samples)
    if state.is_main_process:
        actions.save(folder, correct)
    state.wait_for_everyone()
    if state.is_local_main_process:
        actions.clean_up()
    if state.is_main_process:
        return folder, correct
