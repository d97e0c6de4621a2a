"""From sources to token stores, in steps that run in one process or several."""
