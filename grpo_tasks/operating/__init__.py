"""What a person needs to operate the pipeline: `grpo up`, `grpo doctor`, `grpo trace`."""
