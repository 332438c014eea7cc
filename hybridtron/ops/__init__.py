"""Pure functions on tensors, without parameters and without parallelism: a folder for each op."""
