# wrong: rank 0's barrier (line 16) was matched with rank 1's (line 18). It hangs: rank 0 waits
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
        with state.main_process_first():
            actions.save(folder, correct)
    state.wait_for_everyone()
    if state.is_local_main_process:
        actions.clean_up()
    return folder, correct
