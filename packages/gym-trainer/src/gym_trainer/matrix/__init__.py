"""Every causal language model that the installed transformers knows, tried with every step that Gym takes."""
