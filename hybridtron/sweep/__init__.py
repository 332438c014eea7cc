"""Sweeps: training runs that differ in a few settings. A file lists them; they are run in parallel and compared."""
