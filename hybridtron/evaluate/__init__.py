"""Evaluation of trained models: tasks, perplexity and length instruments, with the conditions of each measurement."""
