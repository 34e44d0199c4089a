"""Start a command of the reader, observe its processes, and put back the files that it changes."""
