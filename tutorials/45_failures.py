"""Calculate how often a job on many GPUs is interrupted, and how often it should save.

python tutorials/45_failures.py
"""

from math import sqrt

from accel_demo.show import table

# Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs. Source: The Llama 3 Herd of
# Models, https://arxiv.org/abs/2407.21783, section 3.3.4
HOURS_PER_FAILURE_OF_ONE_GPU = 54 * 24 / 419 * 16_384
HOURS_PER_SAVE = 1 / 60  # an assumption


def duration(hours: float) -> str:
    if hours >= 48:
        return f"{hours / 24:,.3g} days"
    return f"{hours:.3g} hours" if hours >= 2 else f"{60 * hours:.0f} minutes"


rows = []
for gpus in (8, 64, 1_024, 16_384):
    hours = HOURS_PER_FAILURE_OF_ONE_GPU / gpus
    # Source: Young, A first order approximation to the optimum checkpoint interval,
    # https://doi.org/10.1145/361147.361115
    interval = sqrt(2 * HOURS_PER_SAVE * hours)
    rows.append([f"{gpus:,}", duration(hours), duration(interval)])
print(table(["GPUs", "interrupted every", "save every"], rows))
