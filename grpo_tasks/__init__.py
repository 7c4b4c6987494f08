"""The GRPO pipeline: one file of steps/ is a step, the other folders are the rooms of the library behind the steps."""
