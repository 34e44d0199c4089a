"""Exercise 44, with an Accelerator, and the download inside the block for the cache."""

from accelerate import Accelerator


def run(state, actions):
    a = Accelerator()
    with a.main_process_first():
        folder = actions.open_run()
    with a.local_main_process_first():
        if a.is_local_main_process:
            actions.download()
        samples = actions.prepare()
    correct = actions.evaluate(samples)
    if a.is_main_process:
        actions.save(folder, correct)
    a.wait_for_everyone()
    if a.is_local_main_process:
        actions.clean_up()
    a.end_training()
    return str(folder), correct
