"""Exercise 90: find the physical GPU behind each `cuda:N`."""

from itertools import takewhile


def _matches(gpu_id: str, uuids: list[str]) -> list[int]:
    """Return the GPUs that the id can mean: those with this number or this beginning of a UUID."""
    return [
        gpu
        for gpu, uuid in enumerate(uuids)
        if gpu_id == str(gpu) or (gpu_id.startswith("GPU-") and uuid.startswith(gpu_id))
    ]


def visible_devices(value: str | None, uuids: list[str]) -> dict[str, int]:
    if value is None:
        visible = list(range(len(uuids)))
    else:
        candidates = (_matches(gpu_id, uuids) for gpu_id in value.split(","))
        visible = [gpus[0] for gpus in takewhile(lambda gpus: len(gpus) == 1, candidates)]
    return {f"cuda:{index}": gpu for index, gpu in enumerate(visible)}
