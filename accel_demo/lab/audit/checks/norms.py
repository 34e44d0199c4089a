"""Do the ranks compute different batch statistics, or different buffers that are saved?"""

from collections.abc import Iterator

from accel_demo.lab.audit.result import NOTE, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked, ranks_in_words
from accel_demo.lab.observed.ranks import Rank

PAGE = "32_batch_statistics"


def check(evidence: Evidence) -> Iterator[Finding]:
    evidence.require_connected()
    rank = evidence.ranks[0]
    replicas = [
        model
        for event in rank.of("models")
        for model in event["models"]
        if model["replica"] is not None
    ]
    if not replicas:
        raise NotChecked("no model is wrapped in DistributedDataParallel")
    if all(step.get("buffers") is None for step in rank.of("step")):
        raise NotChecked("the model has no buffers, such as the running means of BatchNorm")
    if names := sorted({name for model in replicas for name in model["batch_norms"]}):
        finding = Finding(
            NOTE,
            "norms",
            f"{' and '.join(names)}: each rank normalizes with the mean and variance of its own "
            "samples, not of the whole batch.",
            "torch.nn.SyncBatchNorm.convert_sync_batchnorm(model) before the model is wrapped "
            "makes them use all samples.",
            PAGE,
        )
        for each in evidence.ranks:
            for wrapped in each.of("wrapped")[:1]:
                finding.add_place(wrapped["line"], each.number)
        yield finding
    yield from _different_when_saved(evidence)


def _different_when_saved(evidence: Evidence) -> Iterator[Finding]:
    for rank in evidence.ranks:
        for save in rank.of("file"):
            before = [step for step in rank.of("step") if step["time"] < save["time"]]
            if save["how"] != "save" or not before:
                continue
            evaluations = [event["time"] for event in rank.of("eval")]
            if any(before[-1]["time"] < each < save["time"] for each in evaluations):
                continue  # if it called the wrapper, DDP has sent rank 0's buffers to the others
            values = {_buffers_at(each, before[-1]) for each in evidence.ranks}
            if len(values) > 1 and None not in values:
                finding = Finding(
                    NOTE,
                    "norms",
                    "After the last step before saving, the buffers of the model, such as running "
                    "means, differ between the ranks. "
                    f"{ranks_in_words([rank.number], evidence.world).capitalize()} saves its own.",
                    "If the others matter, average them before saving, or use SyncBatchNorm.",
                    PAGE,
                )
                yield finding.add_place(save["line"], rank.number)
                return


def _buffers_at(rank: Rank, step: dict) -> int | None:
    """Return the number of a rank's buffers at a step, or None if it is unknown."""
    same = (each for each in rank.steps(step["optimizer"]) if each["number"] == step["number"])
    return next((each.get("buffers") for each in same), None)
