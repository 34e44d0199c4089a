"""The checks. Each module has a function `check(evidence)` that yields findings.

It raises `NotChecked` if the run has no evidence for or against its claim. Page names without the
folder and the ending refer to tutorials/.
"""

from accel_demo.lab.audit.checks import (
    averaged,
    averages,
    batches,
    clipping,
    collectives,
    connected,
    deaths,
    files,
    held,
    initial,
    metrics,
    norms,
    order,
    parts,
    randomness,
    replicas,
    samples,
    saves,
    schedule,
    settings,
    syncs,
    thrown,
    undivided,
)

# A finding of the first check explains findings of the second ones, which are not reported then.
EXPLAINS = {
    "deaths": {"collectives"},
    "batches": {"collectives"},
    "settings": {"replicas"},
    "samples": {"randomness"},
    "replicas": {"averages"},
}
_MODULES = {  # what each check looks at, as printed
    connected: "connected processes",
    deaths: "errors and crashes",
    collectives: "equal collectives",
    samples: "different samples",
    order: "a new order in each epoch",
    randomness: "different random numbers",
    batches: "equal numbers of batches",
    initial: "equal starting weights",
    replicas: "equal weights after each step",
    thrown: "lost gradients",
    schedule: "learning rate schedules",
    held: "parameters of the optimizers",
    files: "files of several ranks",
    clipping: "clipped gradients",
    averaged: "gradients after averaging",
    settings: "equal settings",
    parts: "parts of the data set",
    syncs: "needless all-reduces",
    norms: "batch statistics and buffers",
    averages: "averaged weights",
    saves: "names in saved weights",
    undivided: "losses divided for accumulation",
    metrics: "metrics of all ranks",
}
CHECKS = {module.__name__.rpartition(".")[2]: module.check for module in _MODULES}
TITLES = dict(zip(CHECKS, _MODULES.values(), strict=True))
