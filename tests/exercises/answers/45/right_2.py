"""Exercise 45: decide how often a run saves, by trying the intervals."""


def save_every(record, gpus, step_seconds, save_seconds, restart_seconds):
    gpu_seconds = 3600 * sum(count * hours for count, hours, _ in record)
    between = gpu_seconds / max(1, sum(number for _, _, number in record)) / gpus

    def lost(steps):
        interval = steps * step_seconds
        return save_seconds / interval + interval / 2 / between

    candidates = {max(1, int(1.05**power)) for power in range(300)}
    return min(candidates, key=lost)
