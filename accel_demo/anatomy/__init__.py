"""What the libraries do inside, by hand, each checked against the library."""
