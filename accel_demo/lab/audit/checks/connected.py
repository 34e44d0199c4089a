"""Were the processes that the launcher started connected to each other?"""

from collections.abc import Iterator

from accel_demo.lab.audit.result import ERROR, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked

PAGE = "10_where_am_i"


def check(evidence: Evidence) -> Iterator[Finding]:
    if evidence.world == 1:
        raise NotChecked("there was one process")
    if clones := evidence.clones:
        finding = Finding(
            ERROR,
            "connected",
            f"The launcher started {evidence.world} processes, but `Accelerator()` in each of them "
            "trains alone: they do not share gradients, and each reads all samples.",
            "Write Accelerator(cpu=not torch.cuda.is_available()), or set ACCELERATE_USE_CPU=true "
            "on a machine without GPUs. With one GPU for each process, they would be connected.",
            PAGE,
        )
        for rank in clones:
            finding.add_place(rank.of("accelerator")[0]["line"], rank.number)
        yield finding
        return
    unconnected = [
        rank for rank in evidence.ranks if rank.connected_world < evidence.world and rank.of("step")
    ]
    last = [rank.of("connecting", "connected", "not connected")[-1:] for rank in evidence.ranks]
    if any(event["kind"] == "connecting" for events in last for event in events):
        raise NotChecked("training ended while processes were waiting for their connection")
    if not unconnected:
        return
    alone = [rank for rank in unconnected if rank.of("connecting")]
    finding = Finding(
        ERROR,
        "connected",
        f"The launcher started {evidence.world} processes, but "
        + ("each has connected only to itself" if alone else "they are not connected")
        + ": each trains a model of its own.",
        "Take the rank and the world size from the launcher: torchrun and accelerate launch set "
        "RANK and WORLD_SIZE, which init_process_group() reads."
        if alone
        else "Call torch.distributed.init_process_group() at the start and wrap the model in "
        "DistributedDataParallel, or use Accelerate.",
        PAGE,
    )
    for rank in unconnected:
        finding.add_place((rank.first("connecting") or rank.of("step")[0])["line"], rank.number)
    yield finding
