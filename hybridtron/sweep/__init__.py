"""Many runs that differ in a few settings: read from a file, carried out side by side, and compared."""
