# wrong: the GPUs keep the order of the list. '4,0' on 8 GPUs should be {'cuda:0': 4, 'cuda:1': 0}


def visible_devices(value, uuids):
    if value is None:
        return {f"cuda:{number}": number for number in range(len(uuids))}
    listed = value.split(",")
    visible = [number for number in range(len(uuids)) if str(number) in listed]
    return {f"cuda:{index}": number for index, number in enumerate(visible)}
