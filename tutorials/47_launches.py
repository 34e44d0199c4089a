"""Submit the same program with right and wrong commands, and compare which processes start.

eval "$(python tutorials/cluster/slurm/local_slurm.py up)"
python tutorials/47_launches.py
"""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser
from accel_demo.show import table

WHO = "tutorials/47_who.py"
JOIN = 60  # seconds in which all nodes must have joined
PROLOG = """#!/bin/bash
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head --lines 1)
port=$((20000 + SLURM_JOB_ID % 10000))
export first_node port
"""
NODES = "--nnodes 2 --rdzv-id $SLURM_JOB_ID --rdzv-backend c10d "
NODES += f"--rdzv-endpoint $first_node:$port --rdzv-conf join_timeout={JOIN}"
MACHINES = "--config_file accelerate_configs/multi_node_cpu.yaml --num_machines 2 "
MACHINES += "--num_processes 4 --machine_rank $SLURM_NODEID --main_process_ip $first_node "
MACHINES += f"--main_process_port $port --rdzv_conf timeout={JOIN}"
RANKS = "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
RANKS += "LOCAL_WORLD_SIZE=2 MASTER_ADDR=$first_node MASTER_PORT=$port"
SCRIPTS = {  # what the table shows: (tasks per node, last line of the script)
    "srun torchrun --nnodes 2 …": (1, f"srun torchrun {NODES} --nproc-per-node 2 {WHO}"),
    "torchrun --nnodes 2 …": (1, f"torchrun {NODES} --nproc-per-node 2 {WHO}"),
    "srun torchrun --standalone …": (1, f"srun torchrun --standalone --nproc-per-node 2 {WHO}"),
    "srun bash -c 'accelerate launch …'": (1, f"srun bash -c 'accelerate launch {MACHINES} {WHO}'"),
    'srun bash -c "accelerate launch …"': (1, f'srun bash -c "accelerate launch {MACHINES} {WHO}"'),
    "srun python …": (2, f"srun python {WHO}"),
    "srun bash -c 'RANK=$SLURM_PROCID … python …'": (2, f"srun bash -c '{RANKS} python {WHO}'"),
}
PROCESS = re.compile(r"process (\d+) of (\d+) on (\S+)")


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # which the nodes share
        for line, (tasks, command) in tqdm(SCRIPTS.items(), unit="job", leave=False, disable=None):
            code, printed = run(Path(folder), tasks, command)
            found = PROCESS.findall(printed)
            groups = Counter(int(size) for _, size, _ in found)
            nodes = len({node for *_, node in found})
            what = " + ".join(describe(size, count) for size, count in groups.items()) or "none"
            rows.append([f"`{line}`", tasks, what, nodes, code])
    head = ["last line of the script", "tasks per node", "processes", "nodes", "exit code"]
    print(table(head, rows))


def describe(size: int, count: int) -> str:
    """Return, for example, `2 groups of 2` for four processes, each of which is one of two."""
    return f"{count // size} group{'s' * (count > size)} of {size}"


def run(folder: Path, tasks: int, command: str) -> tuple[int, str]:
    """Submit a job on two nodes, and wait for it. Return its exit code and what it printed."""
    script, output = folder / "job.sbatch", folder / "output.txt"
    script.write_text(f"{PROLOG}{command}\n", encoding="utf-8")
    output.unlink(missing_ok=True)  # of the job before
    flags = f"--wait --time 5 --nodes 2 --ntasks-per-node {tasks} --output {output}".split()
    result = subprocess.run(["sbatch", *flags, str(script)], capture_output=True, text=True)
    if not output.exists():
        raise UserError(f"the job has printed nothing: {result.stderr.strip() or result.stdout}")
    return result.returncode, output.read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    with one_line_errors():
        Parser(__doc__).parse_args()
        main()
