"""What the run must be better at, measured by real generations before and after."""
