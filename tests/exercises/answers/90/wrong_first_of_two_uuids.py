# wrong: 'GPU-5e' on 8 GPUs (GPU 0 is GPU-5e012d1c-77aa-4b1e-9c0d-5e0100aa55bb, GPU 1 is GPU-5e7c


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
