"""A stand-in for the daemon, for tests of the client."""
