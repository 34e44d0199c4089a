"""Does a loader that shuffles return the samples in the same order in every epoch?"""

from collections.abc import Iterator

from accel_demo.lab.audit.checks.samples import indices_of
from accel_demo.lab.audit.result import ERROR, Finding
from accel_demo.lab.observed.evidence import Evidence
from accel_demo.lab.observed.places import NotChecked
from accel_demo.lab.observed.ranks import Rank

PAGE = "30_who_saw_which_sample"
LEAST = 8  # samples


def check(evidence: Evidence) -> Iterator[Finding]:
    several = known = False
    for loader in {loader for rank in evidence.ranks for loader in rank.training_passes}:
        ranks = [rank for rank in evidence.ranks if len(_epochs(rank, loader)) > 1]
        several |= bool(ranks)
        known |= any(all(map(indices_of, _epochs(rank, loader)[:2])) for rank in ranks)
        wrong = [rank for rank in ranks if _repeats(rank, loader)]
        if wrong and len(wrong) == len(ranks):
            finding = Finding(
                ERROR,
                "order",
                "The sampler shuffles, but every epoch has the same samples in the same order on "
                "each rank.",
                "Call sampler.set_epoch(epoch) at the start of each epoch.",
                PAGE,
            )
            for rank in wrong:
                finding.add_place(rank.pass_of(loader, 1)["line"], rank.number)
            yield finding
    if not several:
        raise NotChecked("no loader was read twice for training")
    if not known:
        raise NotChecked("samples of a stream, or after the first 400 batches, are not recorded")


def _epochs(rank: Rank, loader: int) -> list[list[dict]]:
    """Return the passes of the longest training run.

    A new optimizer begins another one, and so does a return to earlier weights, as after a search
    for a learning rate.
    """
    runs: dict[tuple[int, int], list[list[dict]]] = {}
    returns, earlier = 0, set()
    for batches in rank.training_passes.get(loader, []):
        begin = batches[0]["time"]
        optimizers = [each for each in rank.of("optimizer") if each["time"] < begin]
        weights = next((each["before"] for each in rank.of("step") if each["time"] > begin), None)
        returns += weights in earlier
        earlier |= {weights} - {None}
        runs.setdefault((len(optimizers), returns), []).append(batches)
    return max(runs.values(), key=len, default=[])


def _repeats(rank: Rank, loader: int) -> bool:
    passes = _epochs(rank, loader)
    if not all(rank.pass_of(loader, batches[0]["number"])["shuffle"] for batches in passes):
        return False
    orders = list(map(indices_of, passes))
    length = min(map(len, orders))
    return length >= LEAST and all(order[:length] == orders[0][:length] for order in orders)
