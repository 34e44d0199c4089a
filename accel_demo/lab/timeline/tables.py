"""Describe a timeline in sentences and tables, for the terminal and the HTML page."""

from accel_demo.lab import hosts
from accel_demo.lab.measurements import interval_text
from accel_demo.lab.timeline.result import TimelineResult
from accel_demo.show import table
from accel_demo.wording import counted, duration


def as_text(result: TimelineResult) -> str:
    """Return the result as text for the terminal."""
    parts = [
        run_description(result),
        "milliseconds per step (medians):",
        table(*rank_table(result)),
        "\n".join([*all_reduce_sentences(result), verdict(result)]),
    ]
    if result.sweep:
        parts.append(table(*sweep_table(result)))
    return "\n\n".join(parts)


def run_description(result: TimelineResult) -> str:
    """Describe the profiled run in one line."""
    text = f"{counted(result.processes, 'connected process')} on {result.device} "
    text += f"({result.backend}): {result.model}, batches of {result.batch_size} images per process"
    if result.accumulate > 1:
        text += f", {result.accumulate} per step"
    if result.rate:
        text += f", each sending at most {hosts.rate_text(result.rate)}"
    if not result.bucket_bytes:
        return text
    buckets = counted(len(result.bucket_bytes), "bucket")
    if len(result.bucket_bytes) <= 4:
        buckets = " + ".join(f"{size / 2**20:.2f}" for size in result.bucket_bytes) + " MiB"
    return f"{text}, bucket_cap_mb {result.bucket_mb:g} ({buckets})"


def verdict(result: TimelineResult) -> str:
    """Return a sentence that names the slow rank, or states that no rank is slow."""
    slow = result.straggler
    if slow is not None:
        extra = duration(result.ranks[slow].slower_ms / 1000)
        return f"rank {slow} is slow: it computes {extra} longer than the others in each step"
    if result.processes == 1:
        return "a single process waits for no other"
    return "no rank is slower than the others in each step"


def all_reduce_sentences(result: TimelineResult) -> list[str]:
    """Return sentences on how long each rank's all-reduce takes, and how much of it is hidden."""
    sentences = [
        f"rank {rank.rank}: the all-reduce takes {duration(rank.all_reduce_ms / 1000)}, "
        f"{rank.hidden_share:.0%} of it hidden under backward"
        for rank in (result.ranks if result.bucket_bytes else [])
    ]
    if result.rate:
        gradients = sum(result.bucket_bytes)
        sentences.append(hosts.sending_time(gradients, result.processes, result.rate))
    if any("broadcast" in bar.name for rank in result.ranks for bar in rank.lanes["communication"]):
        sentences.insert(0, "all-reduce includes the wait for the buffers of BatchNorm from rank 0")
    return sentences


def rank_table(result: TimelineResult) -> tuple[list[str], list[list]]:
    """Return the header and the rows of a table with median times in ms, one row per rank."""
    rows = []
    for rank in result.ranks:
        times = [*rank.phases_ms.values(), rank.wall_ms, rank.late_ms]
        rows.append([rank.rank, *(round(ms, 1) for ms in times)])
    return ["rank", *result.ranks[0].phases_ms, "step", "late"], rows


def sweep_table(result: TimelineResult) -> tuple[list[str], list[list]]:
    """Return the header and the rows of a table with one row per bucket size."""
    rows = [
        [
            f"{trial.bucket_mb:g}",
            trial.buckets,
            round(trial.all_reduce_ms, 1),
            round(trial.exposed_ms, 1),
            round(100 * trial.hidden_share),
            round(trial.step_ms, 1),
            interval_text(trial.step_interval, digits=1),
        ]
        for trial in result.sweep
    ]
    head = ["bucket MiB", "buckets", "all-reduce ms", "exposed ms", "hidden %", "step ms"]
    return [*head, "90 % interval"], rows
