"""Exercise 90: find the physical GPU behind each `cuda:N`."""

from itertools import takewhile


def visible_devices(value: str | None, uuids: list[str]) -> dict[str, int]:
    if value is None:
        value = ",".join(map(str, range(len(uuids))))
    matches = (matching_gpus(text, uuids) for text in value.split(","))
    valid = takewhile(lambda gpus: len(gpus) == 1, matches)
    return {f"cuda:{number}": gpu for number, [gpu] in enumerate(valid)}


def matching_gpus(text: str, uuids: list[str]) -> list[int]:
    is_uuid = text.startswith("GPU-")
    return [
        gpu
        for gpu, uuid in enumerate(uuids)
        if (uuid.startswith(text) if is_uuid else text == str(gpu))
    ]
