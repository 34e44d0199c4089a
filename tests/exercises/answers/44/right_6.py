"""Exercise 44, with an Accelerator, its decorators, and a broadcast instead of a second look."""

import os

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list


def run(state, actions):
    accelerator = Accelerator(cpu=True)

    @accelerator.on_local_main_process
    def fetch():
        actions.download()
        actions.prepare()

    @accelerator.on_last_process
    def save(folder, correct):
        actions.save(folder, correct)

    fetch()
    accelerator.wait_for_everyone()
    samples = actions.prepare()
    names = [str(actions.open_run()) if accelerator.is_main_process else None]
    broadcast_object_list(names)
    correct = actions.evaluate(samples)
    save(names[0], correct)
    accelerator.wait_for_everyone()
    if os.environ["LOCAL_RANK"] == "0":
        actions.clean_up()
    return names[0], correct
