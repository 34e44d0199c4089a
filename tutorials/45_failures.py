"""Calculate how often a job on many GPUs fails, and how often it should save a checkpoint.

python tutorials/44_failures.py
"""

from math import sqrt

from accel_demo.show import table

# Llama 3: 419 unexpected interruptions in 54 days on 16,384 GPUs. Source: The Llama 3 Herd of
# Models, https://arxiv.org/abs/2407.21783, section 3.3.4
HOURS_PER_FAILURE_OF_ONE_GPU = 54 * 24 / 419 * 16_384
SECONDS_PER_SAVE = 60  # an assumption

rows = []
for gpus in (8, 64, 1_024, 16_384):
    hours = HOURS_PER_FAILURE_OF_ONE_GPU / gpus
    # Source: Young, A first order approximation to the optimum checkpoint interval,
    # https://doi.org/10.1145/361147.361115
    minutes = sqrt(2 * SECONDS_PER_SAVE * 3600 * hours) / 60
    rows.append([f"{gpus:,}", f"{hours:,.0f} hours", f"{minutes:,.0f} minutes"])
print(table(["GPUs", "one failure every", "save every"], rows))
