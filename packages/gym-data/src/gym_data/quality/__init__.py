"""Looking at rows and cleaning them: every tool says how many came in, were kept, changed and dropped, and why."""
