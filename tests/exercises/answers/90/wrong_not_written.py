# wrong: a function is not written yet
def visible_devices(value, uuids):
    raise NotImplementedError
