# wrong: cuda:N counts the visible GPUs from 0, without gaps. '0,4' on 8 GPUs should be


def visible_devices(value, uuids):
    if value is None:
        return {f"cuda:{number}": number for number in range(len(uuids))}
    devices = {}
    for written in value.split(",") if value else []:
        if written.startswith("GPU-"):
            matching = [number for number, uuid in enumerate(uuids) if uuid.startswith(written)]
        else:
            matching = [number for number in range(len(uuids)) if str(number) == written]
        if len(matching) != 1:
            break
        devices[f"cuda:{matching[0]}"] = matching[0]
    return devices
