"""Print which process this is, and on which node of Slurm. The cases of 47_launches.py start it.

python tutorials/47_who.py
"""

import os

from accelerate import Accelerator

from accel_demo.processes.devices import use_cpu

accelerator = Accelerator(cpu=use_cpu())
node = os.environ.get("SLURMD_NODENAME", "this machine")
line = f"process {accelerator.process_index} of {accelerator.num_processes} on {node}\n"
print(line, end="", flush=True)  # one write, so that lines of several processes don't mix
accelerator.wait_for_everyone()
accelerator.end_training()
