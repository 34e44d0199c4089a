"""What `accel-demo shards` says: who read what, what a metric counts, what would hang."""

import string

from accel_demo.lab.shards.reading import Dealing
from accel_demo.show import table

MARKS = string.digits + string.ascii_lowercase  # rank 10 is a, and so on
WIDEST_MAP = 64  # samples; a wider one does not fit into a table


def in_words(dealing: Dealing, processes: int) -> str:
    """What all ways have in common, for the line above the table."""
    per_process = dealing.batch_size // (processes if dealing.split_batches else 1)
    parts = [f"{dealing.samples} samples", f"batches of {per_process} per process"]
    parts += [] if dealing.shuffle else ["not shuffled"]
    parts += [] if dealing.set_epoch else ["set_epoch is never called"]
    parts += ["drop_last"] if dealing.drop_last else []
    return ", ".join(parts)


def reading_table(ways: list[dict]) -> str:
    """A row for each way and epoch."""
    samples, rows = ways[0]["samples"], []
    has_map = samples <= WIDEST_MAP and len(ways[0]["epochs"][0]["batches"]) <= len(MARKS)
    for way in ways:
        for epoch in way["epochs"]:
            same = {None: "–", True: "yes", False: "no"}[epoch["same_order_as_epoch_1"]]
            batches = ", ".join(str(len(batches)) for batches in epoch["batches"])
            row = [way["name"] if epoch["epoch"] == 1 else "", epoch["epoch"]]
            row += [f"`{_map(epoch, samples)}`"] if has_map else []
            row += [len(epoch["more_than_once"]), len(epoch["never"]), batches, same]
            rows.append(row)
    head = ["way", "epoch", f"who read sample 0 … {samples - 1}"][: 3 if has_map else 2]
    head += ["twice or more", "never", "batches by rank", "same order as epoch 1"]
    said = "\n\nA digit is the rank that read the sample, `*` more than one reading, `-` none."
    return table(head, rows) + (said if has_map else "")


def _map(epoch: dict, samples: int) -> str:
    """A character for each sample: its rank, * where it was read more than once, - where never."""
    marks = ["-"] * samples
    for rank, batches in enumerate(epoch["batches"]):
        for batch in batches:
            for sample in batch:
                marks[sample] = MARKS[rank] if marks[sample] == "-" else "*"
    return "".join(marks)


def metric_table(ways: list[dict]) -> str:
    """How many samples the two functions give in an epoch, and how many different ones these are.

    Where they could not be called there is a dash.
    """
    functions, rows = ("gather", "gather_for_metrics"), []
    for way in ways:
        counts = [
            f"{len(way[name])} ({len(set(way[name]))} different)" if name in way else "–"
            for name in functions
        ]
        rows.append([way["name"], way["samples"], *counts])
    return table(["way", "samples", *(f"`{name}`" for name in functions)], rows)


def what_would_hang(ranks: list[list[list[int]]]) -> str:
    """Why nothing was gathered, and what training would do; `ranks` has the batches of each."""
    lengths = [len(batches) for batches in ranks]
    most, fewest = max(lengths), min(lengths)
    if most > fewest:
        has, has_not = lengths.index(most), lengths.index(fewest)
        return (
            f"rank {has} has {most} batches, rank {has_not} has {fewest}. In training the "
            f"all-reduce of batch {fewest + 1} on rank {has} would wait for rank {has_not} until "
            "the time limit of the process group, and so would `gather`. Keep even_batches=True, "
            "or train under torch's `Join`. (Accelerate's `join_uneven_inputs` does nothing on "
            "CPUs.)"
        )
    number = next(
        k for k in range(most) if len({len(batches[k]) for batches in ranks}) > 1
    )  # the batch that is not equally large everywhere
    sizes = ", ".join(str(len(batches[number])) for batches in ranks)
    return (
        f"batch {number + 1} has {sizes} samples by rank. Training would go on, but the mean over "
        "ranks gives a sample in a smaller batch more weight. `gather` takes tensors of one "
        "shape: gloo stops with an error, NCCL waits for ever."
    )
