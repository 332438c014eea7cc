"""Sums and gradients of a softmax over many logits."""
