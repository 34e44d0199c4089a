"""The checks. Each module has a function `check(evidence)` that yields findings.

It raises `NotChecked` if the run has no evidence for or against its claim. Page names without the
folder and the ending refer to tutorials/.
"""

from accel_demo.lab.audit.checks import (
    averaged,
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
}
TITLES = {  # what a check looks at, as printed
    "connected": "connected processes",
    "deaths": "errors and crashes",
    "collectives": "equal collectives",
    "samples": "different samples",
    "order": "a new order in each epoch",
    "batches": "equal numbers of batches",
    "initial": "equal starting weights",
    "replicas": "equal weights after each step",
    "thrown": "lost gradients",
    "schedule": "learning rate schedules",
    "held": "parameters of the optimizers",
    "files": "files of several ranks",
    "clipping": "clipped gradients",
    "averaged": "gradients after averaging",
    "settings": "equal settings",
    "parts": "parts of the data set",
    "syncs": "needless all-reduces",
    "norms": "batch statistics and buffers",
    "saves": "names in saved weights",
    "undivided": "losses divided for accumulation",
    "metrics": "metrics of all ranks",
}
CHECKS = {
    "connected": connected.check,
    "deaths": deaths.check,
    "collectives": collectives.check,
    "samples": samples.check,
    "order": order.check,
    "batches": batches.check,
    "initial": initial.check,
    "replicas": replicas.check,
    "thrown": thrown.check,
    "schedule": schedule.check,
    "held": held.check,
    "files": files.check,
    "clipping": clipping.check,
    "averaged": averaged.check,
    "settings": settings.check,
    "parts": parts.check,
    "syncs": syncs.check,
    "norms": norms.check,
    "saves": saves.check,
    "undivided": undivided.check,
    "metrics": metrics.check,
}
