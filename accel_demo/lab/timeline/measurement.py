"""Profile our train.py, with one bucket size or with several."""

import os
import random
import tempfile
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from accel_demo.data import load_datasets
from accel_demo.errors import UserError
from accel_demo.lab import hosts
from accel_demo.lab.measurements import median_interval
from accel_demo.lab.timeline import merge, recording
from accel_demo.lab.timeline.findings import findings_of
from accel_demo.lab.timeline.phases import rank_timelines
from accel_demo.lab.timeline.result import (
    BucketTrial,
    RankProfile,
    RankTimeline,
    TimelineResult,
)
from accel_demo.lab.timeline.straggler import STEPS_NEEDED
from accel_demo.processes import group
from accel_demo.wording import counted


def measure(options) -> tuple[TimelineResult, list[dict]]:
    """Profile the runs. Return the result, and the traces of the last run, which is shown.

    The runs with the `sizes_to_compare` come before the last run. Raises `UserError` if there are
    too few images for all steps.
    """
    check_images(options)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # hides the profiler's log messages
    sizes = sizes_to_compare(options.bucket_mb, options.repeats)
    runs = [
        recording.ProfileSettings(options.config, options.steps, size, options.straggler)
        for size in [*sizes, options.bucket_mb[-1]]
    ]
    # The search for a straggler may need more steps than the timeline shows.
    runs[-1] = replace(runs[-1], steps=max(options.steps, STEPS_NEEDED))
    by_size: dict[float, list[list[RankTimeline]]] = {size: [] for size in options.bucket_mb}
    buckets = dict.fromkeys(options.bucket_mb if sizes else [], 0)  # the number of buckets
    with (
        tempfile.TemporaryDirectory() as folder,
        hosts.limited_hosts(options.processes, options.rate) as own_hosts,
    ):
        by_rank = group.results_by_rank(
            recording.profile_runs,
            options.processes,
            runs,
            folder,
            prepare=own_hosts.enter if own_hosts else None,
        )
        if own_hosts:
            own_hosts.check([profiles[-1].network for profiles in by_rank])
        for number, run in enumerate(runs):
            profiles = [profiles_of_rank[number] for profiles_of_rank in by_rank]
            traces = merge.load(profiles)
            ranks, straggler = rank_timelines(profiles, traces, options.steps)
            if number < len(sizes):
                by_size[run.bucket_mb].append(ranks)
                buckets[run.bucket_mb] = len(sum(profiles[0].bucket_bytes, []))
    names = ("model", "batch_size", "accumulate", "rate")
    settings = {name: getattr(options, name) for name in names}
    settings["bucket_mb"] = runs[-1].bucket_mb
    result = TimelineResult(
        processes=profiles[0].processes,
        backend=profiles[0].backend,
        device=profiles[0].device,
        description=describe(profiles[0], settings),
        settings=settings,
        bucket_bytes=profiles[0].bucket_bytes,
        ranks=ranks,
        straggler=straggler,
        findings=findings_of(profiles, ranks, straggler),
        sweep=[bucket_trial(size, buckets[size], by_size[size]) for size in buckets],
    )
    return result, traces


def check_images(options) -> None:
    """Raise `UserError` if the training set has too few images for all steps."""
    train_set, _ = load_datasets(options.config, options.processes)
    steps = max(options.steps, STEPS_NEEDED) + recording.STEPS_AROUND
    images = options.batch_size * options.accumulate * options.processes
    if steps * images > len(train_set):
        raise UserError(
            f"{steps} steps of {images} images (including the warm-up) need {steps * images}, "
            f"but there are only {len(train_set)}. Choose a smaller --batch-size."
        )


def describe(profile: RankProfile, settings: dict[str, Any]) -> str:
    """Describe the run of our training loop in one line."""
    text = f"{counted(profile.processes, 'connected process')} on {profile.device} "
    text += f"({profile.backend}): {settings['model']}, "
    text += f"batches of {settings['batch_size']} images per process"
    if settings["accumulate"] > 1:
        text += f", {settings['accumulate']} per step"
    if settings["rate"]:
        text += f", each sending at most {hosts.rate_text(settings['rate'])}"
    for sizes in profile.bucket_bytes:
        buckets = counted(len(sizes), "bucket")
        if len(sizes) <= 4:
            buckets = " + ".join(f"{size / 2**20:.2f}" for size in sizes) + " MiB"
        text += f", bucket_cap_mb {settings['bucket_mb']:g} ({buckets})"
    return text


def sizes_to_compare(bucket_mb: list[float], repeats: int) -> list[float]:
    """Return each size `repeats` times, or an empty list if there is only one size.

    Each repetition has a random order, because the speed of the machine changes over time.
    """
    orders = [random.Random(repeat).sample(bucket_mb, len(bucket_mb)) for repeat in range(repeats)]
    return sum(orders, []) if len(bucket_mb) > 1 else []


def bucket_trial(bucket_mb: float, buckets: int, runs: list[list[RankTimeline]]) -> BucketTrial:
    """Summarize the runs with one bucket size. Each run has one `RankTimeline` per rank."""
    steps = [fmean(rank.wall_ms for rank in ranks) for ranks in runs]
    return BucketTrial(
        bucket_mb=bucket_mb,
        buckets=buckets,
        all_reduce_ms=median(fmean(rank.all_reduce_ms for rank in ranks) for ranks in runs),
        exposed_ms=median(fmean(rank.exposed_ms for rank in ranks) for ranks in runs),
        hidden_share=median(fmean(rank.hidden_share for rank in ranks) for ranks in runs),
        backward_ms=median(fmean(rank.phases_ms["backward"] for rank in ranks) for ranks in runs),
        step_ms=median(steps),
        step_interval=median_interval(steps),
    )
