"""Cross-entropy, of logits and of the head's product."""
