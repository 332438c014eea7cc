"""A training step on a GPU that is not there: what it would launch, move, hold, send and wait for."""
