"""A model answer to exercise 90."""


def visible_devices(value: str | None, uuids: list[str]) -> dict[str, int]:
    if value is None:
        return {f"cuda:{number}": number for number in range(len(uuids))}
    visible = []
    for written in value.split(","):
        matching = [number for number, uuid in enumerate(uuids) if matches(written, number, uuid)]
        if len(matching) != 1:
            break
        visible += matching
    return {f"cuda:{index}": number for index, number in enumerate(visible)}


def matches(written: str, number: int, uuid: str) -> bool:
    return uuid.startswith(written) if written.startswith("GPU-") else written == str(number)
