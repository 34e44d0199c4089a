"""DataParallel beside DDP: the bytes that each device receives and holds."""
