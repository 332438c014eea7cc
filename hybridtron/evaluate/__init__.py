"""What a trained model does: tasks, perplexity and the instruments of length, with results that say how they came."""
