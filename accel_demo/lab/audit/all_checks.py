"""The checks. Each module has a function `check(evidence)` that yields findings.

It raises `NotChecked` if the run has no evidence for or against its claim. Page names without the
folder and the ending refer to tutorials/.
"""

from accel_demo.lab.audit.checks import (
    batches,
    collectives,
    connected,
    deaths,
    files,
    held,
    initial,
    order,
    randomness,
    replicas,
    samples,
    schedule,
    thrown,
)

# A finding of the first check explains findings of the second ones, which are not reported then.
EXPLAINS = {
    "deaths": {"collectives"},
    "batches": {"collectives"},
    "samples": {"randomness"},
}
TITLES = {  # what a check looks at, as printed
    "connected": "connected processes",
    "deaths": "errors and crashes",
    "collectives": "equal collectives",
    "samples": "different samples",
    "order": "a new order in each epoch",
    "randomness": "different random numbers",
    "batches": "equal numbers of batches",
    "initial": "equal starting weights",
    "replicas": "equal weights after each step",
    "thrown": "lost gradients",
    "schedule": "learning rate schedules",
    "held": "parameters of the optimizers",
    "files": "files of several ranks",
}
CHECKS = {
    "connected": connected.check,
    "deaths": deaths.check,
    "collectives": collectives.check,
    "samples": samples.check,
    "order": order.check,
    "randomness": randomness.check,
    "batches": batches.check,
    "initial": initial.check,
    "replicas": replicas.check,
    "thrown": thrown.check,
    "schedule": schedule.check,
    "held": held.check,
    "files": files.check,
}
