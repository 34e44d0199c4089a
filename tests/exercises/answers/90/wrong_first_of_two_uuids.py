# wrong: the beginning of two UUIDs matches no GPU, and hides all ids after it. 'GPU-5e' on 8 GPUs


def visible_devices(value, uuids):
    if value is None:
        return {f"cuda:{number}": number for number in range(len(uuids))}
    visible = []
    for written in value.split(","):
        if written.startswith("GPU-"):
            matching = [number for number, uuid in enumerate(uuids) if uuid.startswith(written)]
        else:
            matching = [number for number in range(len(uuids)) if str(number) == written]
        if not matching:
            break
        visible.append(matching[0])
    return {f"cuda:{index}": number for index, number in enumerate(visible)}
