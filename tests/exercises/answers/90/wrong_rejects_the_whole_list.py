# wrong: a number that matches no GPU hides itself and all ids after it. '0,8,4' on 8 GPUs should be


def visible_devices(value, uuids):
    if value is None:
        value = ",".join(map(str, range(len(uuids))))
    visible = []
    for written in value.split(","):
        if written.startswith("GPU-"):
            matching = [number for number, uuid in enumerate(uuids) if uuid.startswith(written)]
        else:
            matching = [number for number in range(len(uuids)) if str(number) == written]
        if len(matching) != 1:
            return {}
        visible += matching
    return {f"cuda:{index}": number for index, number in enumerate(visible)}
