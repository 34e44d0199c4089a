"""Connect processes, start them, stop them, and notice when one is lost."""
