# wrong: -1 matches no GPU, and hides all ids after it. '-1' on 8 GPUs should be {}, got


def visible_devices(value, uuids):
    if value is None:
        return {f"cuda:{number}": number for number in range(len(uuids))}
    visible = []
    for written in value.split(",") if value else []:
        if written.startswith("GPU-"):
            uuid = next((uuid for uuid in uuids if uuid.startswith(written)), None)
            if uuid is None:
                break
        elif int(written) >= len(uuids):
            break
        else:
            uuid = uuids[int(written)]
        visible.append(uuids.index(uuid))
    return {f"cuda:{index}": number for index, number in enumerate(visible)}
