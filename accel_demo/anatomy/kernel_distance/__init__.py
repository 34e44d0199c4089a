"""One number computed in six ways on several devices, outside training."""
