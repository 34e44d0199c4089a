# wrong: it hangs: ranks 0 and 2 wait in a barrier (line 19), ranks 1 and 3 have returned
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
    if not state.is_local_main_process:
        return folder, correct
    state.wait_for_everyone()
    if state.is_local_main_process:
        actions.clean_up()
    return folder, correct
