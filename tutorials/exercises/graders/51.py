"""Grade exercise 51: compare the diagnoses with the causes of the five cases.

tests/exercises/test_cases_51.py shows that each case has its cause: it writes the logs again, and
audits the scripts.
"""

import sys
from dataclasses import dataclass
from pathlib import Path

from grading import Wrong, grade, import_answer, shorten

CAUSES = (
    *("alone", "larger_batch", "all_samples", "same_order", "different_start", "not_averaged"),
    *("same_random", "fast_schedule", "scaled_twice"),
    *("padding_counted", "one_rank_metric", "mean_of_means"),
)
METRICS = CAUSES[-3:]
NOT_SHOWN = (
    "the log says nothing about that, but it shows something that this would not cause. Do the "
    "numbers in each line agree with those in the first one?"
)
NO_SCHEDULE = "there is no learning rate schedule"
NOT_DIVIDED = "nothing is accumulated, and the script doesn't divide the loss"
NO_METRIC = "it has no metric"
GLOBAL_BATCH = "16 steps read 1,024 images, so that a step uses 64: that is the global batch size"
EACH_ONCE = "16 steps of 2 × 32 images are 1,024, so each image is read once per epoch"
COPIED = "`DistributedDataParallel` copies the weights of rank 0 to all ranks at the start"


@dataclass(frozen=True)
class Case:
    cause: str
    against: dict[str, str]  # {another cause: what in the case contradicts it}


CASES = {
    "a": Case(
        "fast_schedule",
        {
            "alone": "the weights of both ranks have the same sum at the end",
            "larger_batch": GLOBAL_BATCH,
            "all_samples": EACH_ONCE,
            "same_order": NOT_SHOWN,
            "different_start": "the weights of both ranks have the same sum at the end",
            "not_averaged": "the weights of both ranks have the same sum at the end",
            "same_random": NOT_SHOWN,
            "scaled_twice": NOT_SHOWN,
            **dict.fromkeys(METRICS, "it has no metric except the loss, the mean over both ranks"),
        },
    ),
    "b": Case(
        "padding_counted",
        {
            "alone": "16 steps of 64 images are an epoch, so each process reads a half of it",
            "larger_batch": GLOBAL_BATCH,
            "all_samples": EACH_ONCE,
            "same_order": NOT_SHOWN,
            "different_start": NOT_SHOWN,
            "not_averaged": NOT_SHOWN,
            "same_random": NOT_SHOWN,
            "fast_schedule": "the learning rate is constant",
            "scaled_twice": NOT_SHOWN,
            "one_rank_metric": "the numbers of right and wrong images add up to more than a half",
            "mean_of_means": "the accuracy is the number of right images, divided by that of the "
            "right and wrong ones",
        },
    ),
    "c": Case(
        "not_averaged",
        {
            "alone": "a process prints that it is rank 1, so it is connected to another one",
            "larger_batch": GLOBAL_BATCH,
            "all_samples": EACH_ONCE,
            "same_order": "it calls `set_epoch` before each epoch",
            "different_start": f"the seeds differ, but {COPIED}",
            "same_random": "it calls `torch.manual_seed(rank)`, and draws no random numbers later",
            "fast_schedule": NO_SCHEDULE,
            "scaled_twice": NOT_DIVIDED,
            "padding_counted": "each rank tests exactly 500 images, without a loader",
            "one_rank_metric": "each rank prints its own result on all 500 images, which would be "
            "equal if the models were equal",
            "mean_of_means": "it prints numbers of images, not means",
        },
    ),
    "d": Case(
        "same_random",
        {
            "alone": "16 steps of 32 images are half an epoch, so each process reads a half of it",
            "larger_batch": GLOBAL_BATCH,
            "all_samples": EACH_ONCE,
            "same_order": "`accelerator.prepare` makes a loader that shuffles anew in each epoch",
            "different_start": "`set_seed(0)` makes the weights equal, and preparing the model "
            "would do so, too",
            "not_averaged": "the prepared model computes the loss, and its gradients are averaged",
            "fast_schedule": NO_SCHEDULE,
            "scaled_twice": NOT_DIVIDED,
            "padding_counted": "`gather_for_metrics` drops the padding: there are 501 images",
            "one_rank_metric": "the predictions are gathered: there are 501 images",
            "mean_of_means": "it counts right images, and computes no means",
        },
    ),
    "e": Case(
        "all_samples",
        {
            "alone": "a process alone would take batches of 64 images, so 16 steps per epoch",
            "larger_batch": "a step uses 2 × 32 images, which is the global batch size, and there "
            "are not too few steps",
            "same_order": "a loader with `shuffle=True` shuffles anew in each epoch",
            "different_start": f"the seed is 0 on both ranks, and {COPIED}",
            "not_averaged": "`model`, which is wrapped in DDP, computes the loss",
            "same_random": "it calls `torch.manual_seed(rank)` before the loop",
            "fast_schedule": "it advances once per step, and reaches 0 after the last step",
            "scaled_twice": NOT_DIVIDED,
            **dict.fromkeys(METRICS, NO_METRIC),
        },
    ),
}


def observe(answer: Path) -> None:
    diagnoses = getattr(import_answer(answer), "DIAGNOSES", None)
    if not isinstance(diagnoses, dict) or set(diagnoses) != set(CASES):
        raise Wrong(f"DIAGNOSES must be a dictionary with the keys {', '.join(CASES)}")
    for name, chosen in diagnoses.items():
        if chosen == "":
            raise Wrong(f"case {name} has no diagnosis yet")
        if chosen not in CAUSES:
            raise Wrong(f"case {name}: {shorten(chosen)} is not one of the 12 causes in the file")
    for name, case in CASES.items():
        if diagnoses[name] != case.cause:
            raise Wrong(f"case {name} is not {diagnoses[name]}: {case.against[diagnoses[name]]}")


if __name__ == "__main__":
    sys.exit(grade(__file__, __doc__, observe, right="all five diagnoses are correct"))
