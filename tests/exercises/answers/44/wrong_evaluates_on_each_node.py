# wrong: it hangs: ranks 0 and 2 wait in evaluate
from pathlib import Path

from accelerate import PartialState


def run(state: PartialState, actions) -> tuple[Path, int]:
    with state.main_process_first():
        folder = actions.open_run()
    if state.is_local_main_process:
        actions.download()
    with state.local_main_process_first():
        samples = actions.prepare()
    correct = None
    if state.is_local_main_process:
        correct = actions.evaluate(samples)
    if state.is_main_process:
        actions.save(folder, correct)
    state.wait_for_everyone()
    if state.is_local_main_process:
        actions.clean_up()
    return folder, correct
