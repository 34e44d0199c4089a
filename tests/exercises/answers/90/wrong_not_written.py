# wrong: a function is not implemented yet
def visible_devices(value, uuids):
    raise NotImplementedError
