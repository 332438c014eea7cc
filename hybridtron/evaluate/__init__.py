"""Evaluates trained models: tasks, perplexity and length instruments, with each measurement's conditions."""
