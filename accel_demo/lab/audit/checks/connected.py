"""Were the processes that the launcher started connected to each other?"""

from collections.abc import Iterator

from accel_demo.lab.audit.evidence import Evidence
from accel_demo.lab.audit.result import ERROR, Finding, NotChecked

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
            "On a machine without GPUs, write Accelerator(cpu=True), or set "
            "ACCELERATE_USE_CPU=true. With one GPU for each process, they would be connected.",
            PAGE,
        )
        for rank in clones:
            finding.add_place(rank.of("accelerator")[0]["line"], rank.number)
        yield finding
        return
    unconnected = [
        rank for rank in evidence.ranks if rank.connected_world < evidence.world and rank.of("step")
    ]
    if unconnected and not evidence.hang and not any(rank.of("connecting") for rank in unconnected):
        finding = Finding(
            ERROR,
            "connected",
            f"The launcher started {evidence.world} processes, but they are not connected: "
            "each trains a model of its own.",
            "Call torch.distributed.init_process_group() at the start and wrap the model in "
            "DistributedDataParallel, or use Accelerate.",
            PAGE,
        )
        for rank in unconnected:
            finding.add_place(rank.of("step")[0]["line"], rank.number)
        yield finding
