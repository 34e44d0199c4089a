"""Describe a timeline in sentences and tables, for the terminal and the HTML page."""

from accel_demo.lab import hosts, load
from accel_demo.lab.measurements import interval_text
from accel_demo.lab.timeline.result import TimelineResult
from accel_demo.lab.timeline.straggler import LEAST_MS, STEPS_NEEDED
from accel_demo.show import table
from accel_demo.terminal import fill
from accel_demo.wording import counted, duration

LATE_SHARE = 0.05  # of a step; a rank that is less late is not worth a sentence
WHAT_IS_LATE = "late: how much later than the first rank this rank starts a collective"


def as_text(result: TimelineResult) -> str:
    """Return the result as text for the terminal."""
    verdicts = "\n".join(f"**{fill(text, 96)}**" for text in verdict(result))
    parts = [
        result.description,
        f"milliseconds per step (medians of {counted(len(result.ranks[0].steps), 'step')}):",
        table(*rank_table(result)),
        "\n".join([WHAT_IS_LATE] * (result.processes > 1) + all_reduce_sentences(result)),
        verdicts,
    ]
    if result.sweep:
        parts.append(table(*sweep_table(result)))
    return "\n\n".join(filter(None, parts))


def verdict(result: TimelineResult) -> list[str]:
    """Return a sentence for each finding, or one that says that there is none."""
    if result.findings:
        return [finding.text for finding in result.findings]
    if result.processes == 1:
        return ["a single process waits for no other"]
    steps = len(result.ranks[0].steps)
    if steps < STEPS_NEEDED:
        return [
            f"no verdict: {counted(steps, 'step')}, and a slow rank is judged by {STEPS_NEEDED}"
        ]
    latest = max(result.ranks, key=lambda rank: rank.late_ms)
    is_late = latest.late_ms >= max(LEAST_MS, LATE_SHARE * latest.wall_ms)
    if is_late and not load.warning():  # other programs hold up any rank, in any step
        late = duration(latest.late_ms / 1000)
        text = (
            f"no rank is slower at the same operator in each step, but rank {latest.rank} is late "
        )
        return [f"{text}by {late} in the median step: what holds it up differs from step to step"]
    return ["no rank is slower than the others in each step"]


def all_reduce_sentences(result: TimelineResult) -> list[str]:
    """Return sentences on how long each rank's all-reduce takes, and how much of it is hidden."""
    sentences = [
        f"rank {rank.rank}: the all-reduce takes {duration(rank.all_reduce_ms / 1000)}, "
        f"{rank.hidden_share:.0%} of it hidden under backward"
        for rank in (result.ranks if any(result.bucket_bytes) else [])
    ]
    if rate := result.settings.get("rate"):
        gradients = sum(map(sum, result.bucket_bytes))
        sentences.append(hosts.sending_time(gradients, result.processes, rate))
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
            round(trial.backward_ms, 1),
            round(trial.step_ms, 1),
            interval_text(trial.step_interval, digits=1),
        ]
        for trial in result.sweep
    ]
    head = ["bucket MiB", "buckets", "all-reduce ms", "exposed ms", "hidden %", "backward ms"]
    return [*head, "step ms", "90 % interval"], rows
