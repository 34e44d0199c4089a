# wrong: an empty value hides all GPUs
def visible_devices(value, uuids):
    if value is None:
        return {f"cuda:{n}": n for n in range(len(uuids))}
    out = {}
    for p in value.split(","):
        m = [n for n, u in enumerate(uuids) if u.startswith(p) or str(n) == p]
        if len(m) != 1:
            break
        out[f"cuda:{len(out)}"] = m[0]
    return out
