# wrong: an empty value hides all GPUs. '' on 8 GPUs should be {}, got {'cuda:0': 0, 'cuda:1': 1,


def visible_devices(value, uuids):
    if not value:
        return {f"cuda:{number}": number for number in range(len(uuids))}
    visible = []
    for written in value.split(","):
        if written.startswith("GPU-"):
            matching = [number for number, uuid in enumerate(uuids) if uuid.startswith(written)]
        else:
            matching = [number for number in range(len(uuids)) if str(number) == written]
        if len(matching) != 1:
            break
        visible += matching
    return {f"cuda:{index}": number for index, number in enumerate(visible)}
