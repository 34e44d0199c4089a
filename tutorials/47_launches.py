"""Submit the same program with right and wrong commands, and compare which processes start.

eval "$(python tutorials/cluster/slurm/local_slurm.py up)"
python tutorials/47_launches.py
"""

import re
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path

from tqdm import tqdm

from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser
from accel_demo.show import table

PROLOG = """#!/bin/bash
first_node=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head --lines 1)
port=$((20000 + SLURM_JOB_ID % 10000))
export first_node port
"""
WHO = "tutorials/47_who.py"
TORCHRUN = "torchrun --nnodes 2 --nproc-per-node 2 --rdzv-id $SLURM_JOB_ID --rdzv-backend c10d "
TORCHRUN += f"--rdzv-endpoint $first_node:$port --rdzv-conf join_timeout=20 {WHO}"
ACCELERATE = "accelerate launch --config_file accelerate_configs/multi_node_cpu.yaml --num_machines 2 "
ACCELERATE += "--num_processes 4 --machine_rank $SLURM_NODEID --main_process_ip $first_node "
ACCELERATE += f"--main_process_port $port --rdzv_conf timeout=20 {WHO}"
VARIABLES = "RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS "
VARIABLES += "LOCAL_WORLD_SIZE=2 MASTER_ADDR=$first_node MASTER_PORT=$port"
CASES = {  # name: (tasks per node, command)
    "`srun torchrun`": (1, f"srun {TORCHRUN}"),
    "… 2 tasks per node": (2, f"srun {TORCHRUN}"),
    "… `--standalone`": (1, f"srun torchrun --standalone --nproc-per-node 2 {WHO}"),
    "`torchrun` without `srun`": (1, TORCHRUN),
    "`srun bash -c '… $SLURM_NODEID'`": (1, f"srun bash -c '{ACCELERATE}'"),
    '`srun bash -c "… $SLURM_NODEID"`': (1, f'srun bash -c "{ACCELERATE}"'),
    "`srun python`": (2, f"srun python {WHO}"),
    "… with `RANK=$SLURM_PROCID …`": (2, f"srun bash -c '{VARIABLES} exec python {WHO}'"),
}
TIME_LIMIT = 120  # seconds for one job
LINE = re.compile(r"process (\d+) of (\d+) on (\S+)")


def main() -> None:
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, (tasks, command) in tqdm(CASES.items(), unit="job", leave=False, disable=None):
            code, printed = run(Path(folder), tasks, command)
            found = LINE.findall(printed)
            worlds = Counter(int(world) for _, world, _ in found)
            processes = ", ".join(str(world) for world in sorted(worlds.elements())) or "–"
            nodes = len({node for *_, node in found})
            rows.append([name, tasks, len(found), processes, nodes, code])
    head = ["command", "tasks per node", "processes", "of", "nodes", "exit code"]
    print(table(head, rows))


def run(folder: Path, tasks: int, command: str) -> tuple[int, str]:
    """Submit a job on two nodes, and wait for it. Return its exit code and what it printed."""
    script, output = folder / "job.sbatch", folder / "output.txt"
    script.write_text(f"{PROLOG}{command}\n", encoding="utf-8")
    flags = f"--parsable --wait --nodes 2 --ntasks-per-node {tasks} --output {output}".split()
    deadline = time.monotonic() + TIME_LIMIT
    job = subprocess.run(["sbatch", *flags, script], capture_output=True, text=True, timeout=200)
    if not job.stdout:
        raise UserError(f"sbatch failed: {job.stderr.strip()}")
    assert time.monotonic() < deadline
    return job.returncode, output.read_text(encoding="utf-8", errors="replace")


if __name__ == "__main__":
    with one_line_errors():
        Parser(__doc__).parse_args()
        main()
