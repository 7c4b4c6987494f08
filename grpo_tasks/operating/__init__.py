"""Servers and views for whoever operates the pipeline: `grpo up`, `grpo doctor`, `grpo trace`."""
