"""Running on a SLURM cluster: submitting a run, what its job does on the nodes, and how it stands."""
