"""Say what makes the steps slow: one rank, the data, the messages, or what the script does."""

from statistics import median

from accel_demo.lab.observed.places import short_path, text_of
from accel_demo.lab.output import MeasuredFinding
from accel_demo.lab.timeline.result import RankProfile, RankTimeline
from accel_demo.lab.timeline.straggler import STEPS_NEEDED
from accel_demo.wording import byte_size, duration

DATA_SHARE, MESSAGE_SHARE, RANK_SHARE = 0.3, 0.4, 0.3  # of the step
LEAST_DATA_MS = 1.0
MANY_MESSAGES, SMALL_BYTES = 10, 2**20  # buckets of a model, and their mean size
MOST_STEPS_WITHOUT = 0.1  # of the steps, in which a line does not read a tensor


def findings_of(
    profiles: list[RankProfile], ranks: list[RankTimeline], straggler: int | None
) -> list[MeasuredFinding]:
    """Return what makes the steps slow, the gravest first."""
    found = []
    if straggler is not None:
        found.append(_slow(straggler, ranks))
    if len(ranks[0].steps) >= STEPS_NEEDED:
        found += _waits(ranks, found)
    return [*found, *_micro_batches(profiles, ranks), *_buckets(profiles), *_reads(profiles)]


def _slow(slow: int, ranks: list[RankTimeline]) -> MeasuredFinding:
    """Say how much longer the slow rank computes or waits for data, as the medians show it.

    It is never less than the delay by which the rank was found: other phases may be shorter there.
    """
    reliable = ranks[slow].slower_ms
    extra = {
        phase: ms - median(rank.phases_ms[phase] for rank in ranks if rank.rank != slow)
        for phase, ms in ranks[slow].phases_ms.items()
    }
    by_data = reliable.get("data wait", 0.0)
    if by_data > sum(reliable.values()) - by_data:
        kind, where = "waits for data", ""
        text = f"waits {_ms(extra['data wait'])} longer for its data"
    else:
        computing = {phase: ms for phase, ms in reliable.items() if phase != "data wait"}
        most = max(computing, key=computing.__getitem__)
        longer = max(sum(max(0.0, extra[p]) for p in computing), sum(computing.values()))
        kind, text = "computes longer", f"computes {_ms(longer)} longer"
        where = "outside forward, backward and the optimizer" if most == "other" else f"in {most}"
        where = f", most of it {where}"
    text = f"rank {slow} is slow: it {text} than the others in each step"
    return MeasuredFinding(kind, slow, text + where)


def _ms(milliseconds: float) -> str:
    return duration(max(0.0, milliseconds) / 1000)


def _waits(ranks: list[RankTimeline], found: list[MeasuredFinding]) -> list[MeasuredFinding]:
    """Return what all ranks wait for, in addition to a slow rank."""
    findings = []
    share = _least_share(ranks, "data wait")
    waited = min(rank.phases_ms["data wait"] for rank in ranks)
    if share >= DATA_SHARE and waited >= LEAST_DATA_MS:
        who = "each rank" if len(ranks) > 1 else "the process"
        text = f"{who} waits for its DataLoader in {share:.0%} of the time of a step or more"
        findings.append(MeasuredFinding("waits for data", None, text))
    if len(ranks) == 1:
        return findings
    share = _least_share(ranks, "message wait")
    if share >= MESSAGE_SHARE:
        text = f"all ranks wait for messages in {share:.0%} of the time of a step or more"
        findings.append(MeasuredFinding("waits for messages", None, text))
    share = _least_share(ranks, "rank wait")
    if share >= RANK_SHARE and not found:
        text = f"all ranks wait for each other in {share:.0%} of the time of a step or more: "
        text += "their work differs from step to step"
        findings.append(MeasuredFinding("wait for each other", None, text))
    return findings


def _least_share(ranks: list[RankTimeline], phase: str) -> float:
    """Return the smallest share of a phase in the time of all steps, among the ranks.

    The longest tenth of the steps is left out: other programs may have interrupted it.
    """
    shares = []
    for rank in ranks:
        steps = sorted(rank.steps, key=lambda step: sum(step.phases_ms.values()))
        steps = steps[: max(1, len(steps) * 9 // 10)]
        total = sum(sum(step.phases_ms.values()) for step in steps)
        shares.append(sum(step.phases_ms[phase] for step in steps) / total)
    return min(shares)


def _micro_batches(profiles: list[RankProfile], ranks: list[RankTimeline]) -> list[MeasuredFinding]:
    """Find a model that averages its gradients in each backward pass of an accumulation.

    The traces confirm that so many backward passes of a step send something: a script may have
    replaced what DDP does.
    """
    sent = median(step.sending_backwards for rank in ranks for step in rank.steps)
    sent = min(sent, *(profile.averages for profile in profiles))
    if not any(profiles[0].bucket_bytes) or sent < 2:
        return []
    text = f"{sent:.0f} backward passes of a step average the gradients between the ranks: only "
    text += "the last one needs to (no_sync, or Accelerate's accumulate)"
    return [MeasuredFinding("averages each micro-batch", None, text)]


def _buckets(profiles: list[RankProfile]) -> list[MeasuredFinding]:
    for sizes in profiles[0].bucket_bytes:
        if len(sizes) >= MANY_MESSAGES and sum(sizes) / len(sizes) < SMALL_BYTES:
            mean = byte_size(sum(sizes) / len(sizes))
            text = f"DDP sends the gradients in {len(sizes)} buckets of {mean} on average: "
            text += "each costs a message's latency (see bucket_cap_mb, which is 25 by default)"
            return [MeasuredFinding("small messages", None, text)]
    return []


def _reads(profiles: list[RankProfile]) -> list[MeasuredFinding]:
    """Find the lines of the script that read the value of a tensor in each step."""
    findings = []
    for file, line, method, share in profiles[0].reads:
        if share >= 1 - MOST_STEPS_WITHOUT:
            place = f"{short_path(file)}:{line}: {text_of([file, line])}"
            text = f"{place} calls {method} in each step: on a GPU, the CPU waits "
            text += "there until the GPU has computed the value"
            findings.append(MeasuredFinding("reads tensors", None, text))
    return findings
