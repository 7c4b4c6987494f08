"""The GRPO engine (arXiv:2402.03300): one stage is a directory and a command, `python -m grpo_tasks.grpo STAGE_DIR`.

    prompts -> rollout -> scores -> advantages -> microbatches -> loss -> update
    `----------- rounds --------'   advantages    microbatches    losses  learner
    `--------------------------------- trainer ---------------------------------'

Read `advantages` and `losses` next to the paper: they touch tensors only. Nothing here knows Prefect, MLflow, or any file
outside the stage directory.
"""
