"""nn.DataParallel taken apart: the phases of a step."""
