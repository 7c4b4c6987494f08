"""The GRPO pipeline: one file is a step, one folder is a room of the library behind the steps."""
