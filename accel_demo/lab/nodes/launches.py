"""What to type on each node: the reader's own launch, with the flags that differ between nodes."""

from dataclasses import dataclass, replace
from pathlib import Path

from accel_demo.errors import UserError
from accel_demo.lab.course.launch_files import launch_config, train_file
from accel_demo.processes.environment import TORCHRUN_VARIABLES

RUN_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",  # deprecated, but has the same flags
    "accelerate.commands.launch": "accelerate",
}
OWN_CONFIG = Path(__file__).with_name("accelerate_config.yaml")
TRAIN_OPTIONS = "--resume auto --checkpoint-every 10 --collective-timeout 30 --run-dir"
MEETING = 60  # seconds that a launcher waits for the other nodes' launchers
# Wait 10 s for more nodes once there are enough, and consider a silent node dead after 3 × 2 s.
ELASTIC_SETTINGS = "last_call_timeout=10,keep_alive_interval=2"


@dataclass(frozen=True)
class Plan:
    """How many processes to start, and where they meet."""

    nodes: int
    processes_per_node: int
    addresses: list[str]  # of each node
    port: int
    elastic: bool = False
    slurm: bool = False  # set the variables of Slurm's `srun`

    @property
    def address(self) -> str:
        """The address at which the nodes meet."""
        return self.addresses[0]

    @property
    def processes(self) -> int:
        return self.nodes * self.processes_per_node


def default_command(elastic: bool) -> list[str]:
    """Return our own launch, which continues a run that was interrupted, or starts a new one."""
    number = 1
    while Path(f"runs/nodes-{number}/summary.json").exists():  # that run is complete
        number += 1
    accelerate = ["accelerate", "launch", "--config_file", launch_config("multi_node_cpu")]
    launcher = ["torchrun"] if elastic else accelerate
    return [*launcher, train_file("train"), *TRAIN_OPTIONS.split(), f"runs/nodes-{number}"]


def commands_for(command: list[str], plan: Plan, node: int) -> list[tuple[list[str], dict]]:
    """Return a (command, environment variables) pair for each process to start on a node.

    `{node}` in the command is replaced by the node's rank. A launcher gets flags for its node, in
    front of the reader's own flags, which take precedence. A Python script is started once per
    process, with the variables that a launcher would set. Everything else is started once, with
    variables from which a torchrun inside it reads its flags.

    If `plan.slurm` is true, everything but a launcher is started once per process, and gets only
    the variables that `srun` sets.
    """
    words = [word.replace("{node}", str(node)) for word in command]
    kind, place = launcher_in(words)
    local_ranks = range(plan.processes_per_node)
    if plan.slurm and kind not in ("torchrun", "accelerate"):
        check_not_elastic(plan, Path(words[0]).name)
        return [(words, slurm_variables(plan, node, local)) for local in local_ranks]
    shared = {
        "NODE_RANK": str(node),
        "NNODES": str(plan.nodes),
        "NPROC_PER_NODE": str(plan.processes_per_node),
        "MASTER_ADDR": plan.address,
        "MASTER_PORT": str(plan.port),
    }
    if kind == "python":
        check_not_elastic(plan, "python")
        return [(words, shared | rank_variables(plan, node, local)) for local in local_ranks]
    if plan.slurm:
        shared |= slurm_variables(replace(plan, processes_per_node=1), node, 0)
    if kind == "torchrun":
        if "--standalone" in words:
            raise UserError("--standalone connects only the processes of one node. Leave it out.")
        words[place:place] = torchrun_flags(plan, node)
        if plan.elastic:
            # After a restart, connect the workers through a new store.
            shared["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    elif kind == "accelerate":
        check_not_elastic(plan, "accelerate launch")
        words[place:place] = accelerate_flags(words[place:], plan, node)
    else:
        check_not_elastic(plan, Path(words[0]).name)
        # A torchrun inside reads the flags that are not on its command line from these variables.
        # Source: the class `env` in torch/distributed/argparse_util.py
        values = (plan.nodes, node, plan.processes_per_node, plan.address, plan.port)
        shared |= dict(zip(TORCHRUN_VARIABLES, map(str, values), strict=True))
    return [(words, shared)]


def launcher_in(words: list[str]) -> tuple[str, int]:
    """Return the kind of a command, and where to insert a launcher's flags.

    The kind is "torchrun", "accelerate", "python" or "other". A launcher may have other programs in
    front of it, as in `uv run torchrun x.py`.
    """
    if Path(words[0]).name.startswith("python"):
        for place, word in enumerate(words):  # the module follows -m, with or without a space
            module = word.removeprefix("-m")
            if module in RUN_MODULES and (module != word or words[place - 1] == "-m"):
                return RUN_MODULES[module], place + 1
        return "python", 0
    for place, word in enumerate(words):
        program = Path(word).name
        if program == "torchrun":
            return "torchrun", place + 1
        if program == "accelerate-launch":
            return "accelerate", place + 1
        if program == "accelerate" and words[place + 1 : place + 2] == ["launch"]:
            return "accelerate", place + 2
    return "other", 0


def torchrun_flags(plan: Plan, node: int) -> list[str]:
    if plan.elastic:
        flags = f"--nnodes 1:{plan.nodes} --max-restarts 3 --rdzv-backend c10d --rdzv-id nodes "
        flags += f"--rdzv-endpoint {plan.address}:{plan.port} "
        # Without these two, torchrun uses host names, which may stand for 127.0.1.1 or be unknown.
        flags += f"--local-addr {plan.addresses[node]} "
        flags += f"--rdzv-conf is_host={int(node == 0)},{ELASTIC_SETTINGS}"
    else:
        flags = f"--nnodes {plan.nodes} --node-rank {node} --master-addr {plan.address} "
        flags += f"--master-port {plan.port} --rdzv-conf timeout={MEETING}"
    return f"{flags} --nproc-per-node {plan.processes_per_node}".split()


def accelerate_flags(words: list[str], plan: Plan, node: int) -> list[str]:
    """Return the flags for a node. `words` are the launcher's own flags, and the script's."""
    flags = f"--num_machines {plan.nodes} --machine_rank {node} --main_process_ip {plan.address} "
    flags += f"--main_process_port {plan.port} --num_processes {plan.processes} "
    flags += f"--rdzv_conf timeout={MEETING}"
    return [*([] if has_config(words) else ["--config_file", str(OWN_CONFIG)]), *flags.split()]


def has_config(words: list[str]) -> bool:
    """Return whether the launcher has a config. Flags of the script come after its name."""
    for word in words:
        if word.split("=")[0] in ("--config_file", "--config-file"):
            return True
        if word.endswith(".py") or word in ("-m", "--module"):
            break
    return False


def rank_variables(plan: Plan, node: int, local_rank: int) -> dict[str, str]:
    """Return the variables for `init_process_group`, as torchrun sets them."""
    return {
        "RANK": str(node * plan.processes_per_node + local_rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(plan.processes),
        "LOCAL_WORLD_SIZE": str(plan.processes_per_node),
        "GROUP_RANK": str(node),
    }


def slurm_variables(plan: Plan, node: int, local_rank: int) -> dict[str, str]:
    """Return the variables that `srun` sets for a task.

    Source: https://slurm.schedmd.com/srun.html
    """
    nodes, tasks = ",".join(plan.addresses), plan.processes_per_node
    variables = {
        "PROCID": node * tasks + local_rank,
        "LOCALID": local_rank,
        "NODEID": node,
        "NTASKS": plan.processes,
        "NPROCS": plan.processes,
        "STEP_NUM_TASKS": plan.processes,
        "NTASKS_PER_NODE": tasks,
        "TASKS_PER_NODE": f"{tasks}(x{plan.nodes})" if plan.nodes > 1 else tasks,
        "NNODES": plan.nodes,
        "JOB_NUM_NODES": plan.nodes,
        "JOB_NODELIST": nodes,
        "NODELIST": nodes,
        "STEP_NODELIST": nodes,
        "LAUNCH_NODE_IPADDR": plan.address,
        "JOB_ID": plan.port,  # another number in each run, as in a cluster
        "JOBID": plan.port,
        "STEP_ID": 0,
    }
    named = {f"SLURM_{name}": str(value) for name, value in variables.items()}
    return named | {"SLURMD_NODENAME": plan.addresses[node]}


def check_not_elastic(plan: Plan, launcher: str) -> None:
    if plan.elastic:
        raise UserError(
            f"{launcher} cannot change the number of nodes. Use --elastic -- torchrun SCRIPT."
        )
