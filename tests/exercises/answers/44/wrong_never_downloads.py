# wrong: rank 0 calls prepare, but no rank has downloaded to node 0's disk yet
from pathlib import Path

from accelerate import PartialState


def run(state: PartialState, actions) -> tuple[Path, int]:
    with state.main_process_first():
        folder = actions.open_run()
    with state.local_main_process_first():
        samples = actions.prepare()
    correct = actions.evaluate(samples)
    if state.is_main_process:
        actions.save(folder, correct)
    state.wait_for_everyone()
    if state.is_local_main_process:
        actions.clean_up()
    return folder, correct
