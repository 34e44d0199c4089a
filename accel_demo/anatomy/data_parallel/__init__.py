"""The phases of nn.DataParallel, rebuilt by hand."""
