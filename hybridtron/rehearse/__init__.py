"""Rehearsal of a training step on a simulated GPU: its launches, memory, traffic and waits."""
