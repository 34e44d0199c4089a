"""Exercise 45: decide how often a run saves, from a record of earlier runs."""


def interruptions_per_second(record, gpus):
    events, gpu_seconds = 0, 0.0
    for count, hours, number in record:
        events += number
        gpu_seconds += 3600 * count * hours
    return (events or 1) * gpus / gpu_seconds


def save_every(record, gpus, step_seconds, save_seconds, restart_seconds):
    rate = interruptions_per_second(record, gpus)
    steps = (2 * save_seconds / rate) ** 0.5 / step_seconds
    return int(steps) or 1
