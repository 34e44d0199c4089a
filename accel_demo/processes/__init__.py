"""Start, connect and stop processes, and detect lost processes."""
