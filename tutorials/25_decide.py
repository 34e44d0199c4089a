"""Decide between accumulation, DDP and sharding from the batch you want and the memory you have.

python tutorials/25_decide.py --global-batch 256 --fits 64 --gpus 2
"""

from dataclasses import dataclass

from accel_demo.errors import UserError, one_line_errors
from accel_demo.options import Parser
from accel_demo.show import table
from accel_demo.wording import counted

TOO_LARGE = """Not even one sample fits. Accumulation and DDP won't help, because both need
the whole model and one sample on each device. In this order, try:
1. activation checkpointing, which recomputes activations in backward (page 42)
2. bf16, which stores most activations in half the bytes (page 33)
3. FSDP, which shards weights, gradients and optimizer state over several GPUs (page 42)"""


@dataclass(frozen=True)
class Plan:
    """A way to train with `processes` × `batch_size` × `micro_batches` samples per step."""

    processes: int
    batch_size: int  # samples per micro-batch in each process
    micro_batches: int  # per optimizer step

    @property
    def global_batch(self) -> int:
        return self.processes * self.batch_size * self.micro_batches

    @property
    def method(self) -> str:
        accumulation = "accumulation (page 23)" if self.micro_batches > 1 else ""
        ddp = "DDP" if self.processes > 1 else ""
        return " and ".join(filter(None, (ddp, accumulation))) or "plain training"


def plans(global_batch: int, fits: int, gpus: int) -> list[Plan]:
    """Return a plan for one GPU and, if `gpus` is above 1, a faster plan for several GPUs.

    `fits` is the largest batch that fits in the memory of one GPU. If it is 0, there is no plan.
    DDP needs memory for its buckets, so `fits` should be measured with DDP.
    Raises `UserError` if a number is too small.
    """
    smallest = (("--global-batch", global_batch, 1), ("--fits", fits, 0), ("--gpus", gpus, 1))
    for flag, value, minimum in smallest:
        if value < minimum:
            raise UserError(f"{flag} must be at least {minimum}, got {value}")
    if fits == 0:
        return []
    # A process without a sample has nothing to do.
    counts = dict.fromkeys([1, min(gpus, global_batch)])
    return [plan_for(processes, global_batch, fits) for processes in counts]


def plan_for(processes: int, global_batch: int, fits: int) -> Plan:
    """Return the plan closest to the global batch. Of several, take the fewest micro-batches.

    A plan may have up to twice as many micro-batches as necessary. With even more, their batches
    would be too small to keep a GPU busy.
    """
    fewest = -(-global_batch // (processes * fits))  # rounded up
    candidates = []
    for micro_batches in range(1, 2 * fewest + 1):
        batch_size = max(1, min(fits, round(global_batch / (processes * micro_batches))))
        candidates.append(Plan(processes, batch_size, micro_batches))
    return min(candidates, key=lambda plan: abs(plan.global_batch - global_batch))


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--global-batch", type=int, required=True, help="samples per step")
    parser.add_argument("--fits", type=int, required=True, help="samples that fit on one GPU")
    parser.add_option("--gpus", 1, "GPUs you have")
    options = parser.parse_args()
    found = plans(options.global_batch, options.fits, options.gpus)
    if not found:
        print(TOO_LARGE)
        return
    head = ["use", "processes", "batch per process", "micro-batches", "global batch", "off by"]
    rows = []
    for plan in found:
        off = plan.global_batch - options.global_batch
        sizes = plan.processes, plan.batch_size, plan.micro_batches, plan.global_batch
        rows.append([plan.method, *sizes, off])
    print(table(head, rows))
    if unused := options.gpus - found[-1].processes:
        print(f"\nA batch this small leaves {counted(unused, 'GPU')} without a sample.")


if __name__ == "__main__":
    with one_line_errors():
        main()
