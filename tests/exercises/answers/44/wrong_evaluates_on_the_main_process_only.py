# wrong: it hangs: rank 0 waits in evaluate (line 16), ranks 1, 2 and 3 wait in a barrier
from pathlib import Path

from accelerate import PartialState


def run(state: PartialState, actions) -> tuple[Path, int]:
    with state.main_process_first():
        folder = actions.open_run()
    if state.is_local_main_process:
        actions.download()
    with state.local_main_process_first():
        samples = actions.prepare()
    correct = 0
    if state.is_main_process:
        correct = actions.evaluate(samples)
        actions.save(folder, correct)
    state.wait_for_everyone()
    if state.is_local_main_process:
        actions.clean_up()
    return folder, correct
