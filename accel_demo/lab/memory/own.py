"""Measure the memory of the reader's script, and calculate what it would need on more devices."""

import shlex
import shutil
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
from accel_demo.lab.output import MeasuredFinding
from accel_demo.observer.agent import MEASURED_STEPS
from accel_demo.show import table
from accel_demo.terminal import fill
from accel_demo.wording import byte_size, counted

STEPS, QUICK_STEPS = 12, 6
LEAST_STEPS = 4  # to say that the memory grows
LEAST_GROWTH = 64 * 1024  # bytes per step; less is not noticed
GATHERED = "gathered blocks"  # a part of what a step needs, and never measured on their own
KINDS = ["parameters", "gradients", "optimizer state", "buckets", "other models"]
KINDS += [GATHERED, "activations"]
MEASURED = [kind for kind in KINDS if kind != GATHERED]
LASTING = ["parameters", "optimizer state", "buckets", "other models"]
VIEWS = "The gradients are views of the buckets, so they have no bytes of their own."
LEFT_OUT = (
    "The formulas do not contain what is the same everywhere: Python, the libraries, the data, and "
    "tensors that no module or optimizer holds; on GPUs, also CUDA's context, the allocator's "
    "unused blocks, and the workspaces of cuBLAS, cuDNN and NCCL."
)


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank of the script.

    `kinds` maps `KINDS` to what exists on this rank, except that gathered blocks are 0.
    Activations are what a forward pass has added when backward begins. `in_step` is the most that a
    step has needed in addition to the `LASTING` kinds, so it contains gradients and gathered blocks
    (0 if it is unknown). `growth` is how much more memory is in use after each step than after the
    one before, and `keeps_graph` is True if more of autograd's graph is alive, too.
    """

    rank: int
    kinds: dict[str, int]
    in_step: int
    growth: int
    steps: int
    keeps_graph: bool = False

    @property
    def peak(self) -> int:
        return sum(self.kinds[kind] for kind in LASTING) + self.in_step


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
    parameters: int
    optimizers: list[str]
    ranks: list[RankMemory]
    devices: int
    strategies: list[StrategyMemory]
    findings: list[MeasuredFinding]


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
        parameters=states[0]["elements"],
        optimizers=states[0]["optimizers"],
        ranks=ranks,
        devices=devices,
        strategies=predict(evidence.ranks[0], states, ranks[0], devices),
        findings=findings_of(ranks),
    )


def memory_of(rank: Rank, state: dict) -> RankMemory:
    steps = rank.of("memory")
    kinds = {
        "parameters": state["parameters"],
        "gradients": gradients_beside_buckets(state, "gradients"),
        "optimizer state": state["optimizer_state"],
        "buckets": sum(map(sum, state["bucket_bytes"])),
        "other models": state["other_models"],
        GATHERED: 0,
        "activations": round(median(step["activations"] for step in steps)),
    }
    return RankMemory(
        rank=rank.number,
        kinds=kinds,
        in_step=round(median(step["peak"] or 0 for step in steps)),
        growth=growth_of([step["base"] for step in steps]),
        steps=len(steps),
        keeps_graph=growth_of([step["graph"] for step in steps], least=1) > 0,
    )


def gradients_beside_buckets(state: dict, kind: str) -> int:
    """Return the bytes of gradients, or 0 if they are views of DDP's buckets."""
    return 0 if state["view_of_buckets"] else state[kind]


def growth_of(base: list[int], least: int = LEAST_GROWTH) -> int:
    """Return by how much a number grows in a step, if by at least `least` in nearly all steps."""
    changes = sorted(after - before for before, after in zip(base, base[1:], strict=False))
    if len(base) < LEAST_STEPS or changes[len(changes) // 5] < least:
        return 0
    return round(median(changes))


def predict(
    rank: Rank, states: list[dict], memory: RankMemory, devices: int
) -> list[StrategyMemory]:
    """Calculate the bytes on each of `devices` devices from those of one rank.

    Parameters, gradients and optimizer state come from the shapes of the tensors. Activations,
    other models, and what else a step needs are as large as on the rank, if each device gets as
    many samples.
    Source: sections 3 and 5 of https://arxiv.org/abs/1910.02054 (ZeRO)
    """
    state = states[0]  # of `rank`
    whole, buckets = state["all_parameters"], state["all_gradients"]
    gradients = gradients_beside_buckets(state, "all_gradients")  # of DDP and ZeRO-1
    optimizer, gathered = whole_optimizer_state(states), gathered_bytes(state, devices)
    models, activations = memory.kinds["other models"], memory.kinds["activations"]
    accumulates = max(step["backwards"] for step in rank.of("memory")) > 1

    def in_step(gradients: int) -> int:
        """Return the bytes of gradients and activations when they need the most."""
        both = gradients + activations
        return both if accumulates else max(gradients, activations)

    gathered_here = gathered_bytes(state, state["processes"]) if state["is_sharded"] else 0
    other = max(0, memory.in_step - in_step(memory.kinds["gradients"]) - gathered_here)
    shard = -(-buckets // devices), -(-optimizer // devices)
    sizes = {
        "DDP": (whole, gradients, optimizer, buckets, models, 0),
        "ZeRO-1": (whole, gradients, shard[1], buckets, models, 0),
        "ZeRO-2": (whole, *shard, 0, models, 0),
        "ZeRO-3, FSDP2": (-(-whole // devices), *shard, 0, models, gathered),
    }
    found = []
    for strategy, each in sizes.items():
        kinds = dict(zip(KINDS, (*each, activations), strict=True))
        lasting = sum(kinds[kind] for kind in LASTING)
        peak = lasting + kinds[GATHERED] + in_step(kinds["gradients"]) + other
        found.append(StrategyMemory(strategy, kinds, peak))
    return found


def whole_optimizer_state(states: list[dict]) -> int:
    """Return the bytes of the optimizer state of all parameters, from the states of all ranks.

    A rank of ZeRO has the state of some parameters only, and one of DDP has that of all.
    """
    sizes = [state["whole_states"] for state in states]
    if len({(state["trained"], len(own)) for state, own in zip(states, sizes, strict=True)}) > 1:
        return sum(sizes[0])  # the ranks train different parameters
    return sum(map(max, zip(*sizes, strict=True)))


def gathered_bytes(state: dict, devices: int) -> int:
    """Return the most that FSDP2 holds whole, in addition to the shards.

    In backward, these are the parameters and the gradients of a block, the parameters of the next
    one, which are gathered ahead, and the gradients of the one before, until they are sent. At this
    time, the shards of two gradients do not exist yet. Parameters outside of blocks stay gathered
    from forward to the end of backward.
    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py
    """
    most = 0
    for outside, largest, following, before in state["blocks"]:
        sent = [min(size, state["all_gradients"]) for size in (largest, following, before)]
        missing = (sent[0] + sent[1]) // devices if before else 0
        most = max(most, outside + largest + following + sent[0] + sent[2] - missing)
    return most


def findings_of(ranks: list[RankMemory]) -> list[MeasuredFinding]:
    """Say that the memory grows from step to step, if it does on a rank."""
    growing = [rank for rank in ranks if rank.growth]
    if not growing:
        return []
    most = max(rank.growth for rank in growing)
    text = f"the memory grows by {byte_size(most)} in each step"
    if any(rank.keeps_graph for rank in growing):
        text += ": the script keeps tensors with their graph, such as losses without .detach()"
    else:
        text += ", but autograd's graph does not: a cache or a list that gets longer can cause this"
    return [MeasuredFinding("grows", None, text)]


def bytes_per_parameter(result: OwnMemoryResult) -> float:
    """Return the bytes per parameter on a rank of DDP by formula, without activations."""
    kinds = result.strategies[0].kinds
    held = sum(kinds[kind] for kind in ("parameters", "gradients", "optimizer state", "buckets"))
    return held / result.parameters


def as_text(result: OwnMemoryResult) -> str:
    """Return the result as text for the terminal."""
    processes = processes_in_words(result.processes, len(result.ranks))
    optimizers = ", ".join(dict.fromkeys(result.optimizers))
    steps = counted(min(rank.steps for rank in result.ranks), "step")
    measured = [
        [rank.rank, *_cells(rank.kinds, MEASURED), _mib(rank.in_step) if rank.in_step else "–"]
        for rank in result.ranks
    ]
    formula = [
        [each.strategy, *_cells(each.kinds, KINDS), _mib(each.peak)] for each in result.strategies
    ]
    parts = [
        f"{processes} on {result.device}, {optimizers}: {shlex.join(result.command_line)}",
        f"MiB on each rank (activations and the most in a step: medians of {steps}):",
        table(["rank", *MEASURED, "most in a step"], measured),
        '"most in a step" is needed in addition to parameters, optimizer state, buckets and other '
        "models.",
        VIEWS
        if result.ranks[0].kinds["buckets"] and not result.ranks[0].kinds["gradients"]
        else "",
        f"MiB on each of {result.devices} devices, by formula (--devices N for another number):",
        table(["strategy", *KINDS, "peak"], formula),
        fill(LEFT_OUT, 100),
        *[f"**{fill(finding.text, 96)}**" for finding in result.findings],
    ]
    return "\n\n".join(filter(None, parts))


def _cells(kinds: dict[str, int], shown: list[str]) -> list[str]:
    return [_mib(kinds[kind]) if kinds[kind] else "–" for kind in shown]


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f}"
