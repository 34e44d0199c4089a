"""Measure the memory of the reader's script, and calculate what it would need on more devices."""

import shlex
import shutil
import textwrap
from dataclasses import dataclass
from statistics import median

from accel_demo.errors import say
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.observation import (
    observe,
    processes_in_words,
    say_if_killed,
    too_few_steps,
)
from accel_demo.lab.observed.ranks import Rank
from accel_demo.observer.agent import MEASURED_STEPS
from accel_demo.show import table
from accel_demo.wording import byte_size, counted

STEPS, QUICK_STEPS = 12, 6
LEAST_STEPS = 4  # to say that the memory grows
GATHERED = 3  # blocks that FSDP2 holds whole: the current one, its gradients, and the next one
LEAST_GROWTH = 64 * 1024  # bytes per step; less is not noticed
KINDS = ["parameters", "gradients", "optimizer state", "buckets", "gathered blocks", "activations"]
LEFT_OUT = (
    "The formulas do not contain what is the same everywhere: Python, the libraries and the data; "
    "on GPUs, also CUDA's context, the allocator's unused blocks, and the workspaces of cuBLAS, "
    "cuDNN and NCCL."
)


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank of the script.

    `kinds` maps `KINDS` to what exists on this rank; activations are what a forward pass has added
    when backward begins. `in_step` is the most that a step has needed in addition to parameters,
    optimizer state and buckets, so it contains gradients (0 if it is unknown). `growth` is how much
    more memory is in use after each step than after the one before.
    """

    rank: int
    kinds: dict[str, int]
    in_step: int
    growth: int
    steps: int

    @property
    def peak(self) -> int:
        return sum(self.kinds[kind] for kind in LASTING) + self.in_step


LASTING = ["parameters", "optimizer state", "buckets"]


@dataclass(frozen=True)
class StrategyMemory:
    """Bytes on each of N devices with one way to train, by formula."""

    strategy: str
    kinds: dict[str, int]
    peak: int


@dataclass(frozen=True)
class OwnMemoryResult:
    """The memory of a script: measured on each rank, and by formula for `devices` devices."""

    processes: int
    command_line: list[str]
    exit_code: int | None
    device: str
    optimizers: list[str]
    ranks: list[RankMemory]
    devices: int
    strategies: list[StrategyMemory]
    findings: list[str]


def measure_script(options) -> OwnMemoryResult:
    """Measure the reader's command. Raises `UserError` if it makes too few optimizer steps."""
    steps = QUICK_STEPS if options.quick else STEPS
    limits = {MEASURED_STEPS: str(steps)}
    return observe(options, "memory", limits, lambda evidence: read(evidence, options)).content


def read(evidence: Evidence, options) -> OwnMemoryResult:
    """Return the result, and copy the snapshots of GPUs to `options.output`."""
    say_if_killed(evidence)
    if not all(rank.first("state") for rank in evidence.ranks):
        raise too_few_steps(evidence)
    for rank in evidence.ranks:
        if not (snapshot := (rank.first("state") or {})["snapshot"]):
            continue
        options.output.mkdir(parents=True, exist_ok=True)
        target = options.output / f"rank-{rank.number}.pickle"
        shutil.copyfile(snapshot, target)
        say(f"wrote {target}: open it in https://pytorch.org/memory_viz")
    return result_of(evidence, options.command, options.devices)


def result_of(evidence: Evidence, command: list[str], devices: int | None) -> OwnMemoryResult:
    states = [state for rank in evidence.ranks if (state := rank.first("state"))]
    ranks = [memory_of(rank, state) for rank, state in zip(evidence.ranks, states, strict=True)]
    processes = states[0]["processes"]
    devices = devices or max(2, processes)
    return OwnMemoryResult(
        processes=processes,
        command_line=command,
        exit_code=evidence.exit_code,
        device=states[0]["device"],
        optimizers=states[0]["optimizers"],
        ranks=ranks,
        devices=devices,
        strategies=predict(evidence.ranks[0], states[0], ranks[0], devices),
        findings=findings_of(ranks),
    )


def memory_of(rank: Rank, state: dict) -> RankMemory:
    steps = rank.of("memory")
    buckets = 0 if state["view_of_buckets"] else sum(map(sum, state["bucket_bytes"]))
    sizes = [
        state["parameters"],
        state["trained"],
        state["optimizer_state"],
        buckets,
        GATHERED * state["largest_block"] if state["is_sharded"] else 0,
        round(median(step["activations"] for step in steps)),
    ]
    return RankMemory(
        rank=rank.number,
        kinds=dict(zip(KINDS, sizes, strict=True)),
        in_step=round(median(step["peak"] or 0 for step in steps)),
        growth=growth_of([step["base"] for step in steps]),
        steps=len(steps),
    )


def growth_of(base: list[int]) -> int:
    """Return by how many bytes the memory grows in a step, if it does so in nearly all steps."""
    changes = sorted(after - before for before, after in zip(base, base[1:], strict=False))
    if len(base) < LEAST_STEPS or changes[len(changes) // 5] < LEAST_GROWTH:
        return 0
    return round(median(changes))


def predict(rank: Rank, state: dict, memory: RankMemory, devices: int) -> list[StrategyMemory]:
    """Calculate the bytes on each of `devices` devices from those of one rank.

    Parameters, gradients and optimizer state come from the shapes of the tensors. Activations, and
    what else a step needs, are as large as on the rank, if each device gets as many samples.
    Sources: sections 3 and 5 of https://arxiv.org/abs/1910.02054 (ZeRO), and for FSDP2's blocks
    torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
    """
    whole, gradients = state["all_parameters"], state["all_trained"]
    optimizer, block = state["all_optimizer_state"], state["largest_block"]
    activations = memory.kinds["activations"]
    accumulates = max(step["backwards"] for step in rank.of("memory")) > 1

    def in_step(gradients: int) -> int:
        """Return the bytes of gradients and activations when they need the most."""
        both = gradients + activations
        return both if accumulates else max(gradients, activations)

    other = max(0, memory.in_step - in_step(state["trained"]) - memory.kinds["gathered blocks"])
    shard = -(-gradients // devices), -(-optimizer // devices)
    sizes = {
        "DDP": (whole, gradients, optimizer, gradients, 0),
        "ZeRO-1": (whole, gradients, shard[1], gradients, 0),
        "ZeRO-2": (whole, *shard, 0, 0),
        "ZeRO-3, FSDP2": (-(-whole // devices), *shard, 0, GATHERED * block),
    }
    found = []
    for strategy, each in sizes.items():
        kinds = dict(zip(KINDS, (*each, activations), strict=True))
        lasting = sum(kinds[kind] for kind in LASTING)
        peak = lasting + kinds["gathered blocks"] + in_step(kinds["gradients"]) + other
        found.append(StrategyMemory(strategy, kinds, peak))
    return found


def findings_of(ranks: list[RankMemory]) -> list[str]:
    """Say that the memory grows from step to step, if it does on a rank."""
    growing = [rank for rank in ranks if rank.growth]
    if not growing:
        return []
    most = max(rank.growth for rank in growing)
    text = f"the memory grows by {byte_size(most)} in each step: something keeps tensors, "
    text += "such as a list of losses without .detach(), or an evaluation without torch.no_grad()"
    return [text]


def as_text(result: OwnMemoryResult) -> str:
    """Return the result as text for the terminal."""
    processes = processes_in_words(result.processes, len(result.ranks))
    optimizers = ", ".join(dict.fromkeys(result.optimizers))
    steps = counted(min(rank.steps for rank in result.ranks), "step")
    measured = [
        [rank.rank, *_cells(rank.kinds), _mib(rank.in_step) if rank.in_step else "–"]
        for rank in result.ranks
    ]
    formula = [[each.strategy, *_cells(each.kinds), _mib(each.peak)] for each in result.strategies]
    parts = [
        f"{processes} on {result.device}, {optimizers}: {shlex.join(result.command_line)}",
        f"MiB on each rank (activations and the most in a step: medians of {steps}):",
        table(["rank", *KINDS, "most in a step"], measured),
        '"most in a step" is what a step needs in addition to parameters, optimizer state and '
        "buckets.",
        f"MiB on each of {result.devices} devices, by formula (--devices N for another number):",
        table(["strategy", *KINDS, "peak"], formula),
        textwrap.fill(LEFT_OUT, 100),
        *[f"**{textwrap.fill(finding, 96)}**" for finding in result.findings],
    ]
    return "\n\n".join(parts)


def _cells(kinds: dict[str, int]) -> list[str]:
    return [_mib(size) if size else "–" for size in kinds.values()]


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"
