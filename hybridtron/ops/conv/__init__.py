"""The short causal convolution before a state space layer."""
