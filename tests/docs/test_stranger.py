"""What a stranger does first: the demo of the quickstart trains a model and leaves a run directory."""
