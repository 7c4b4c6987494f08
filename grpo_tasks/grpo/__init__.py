"""The GRPO engine (arXiv:2402.03300): one stage is a directory and a command, `python -m grpo_tasks.grpo STAGE_DIR`.

    prompts -> groups -> scores -> advantages -> micro-batches -> loss -> update
    schedule   groups    groups    advantages    microbatches     losses  learner
               `------- rounds ------------'     `----------- trainer ----------'

`advantages` and `losses` touch tensors only: the pages to read beside the paper. Nothing here knows Prefect, MLflow, or any
file outside the stage directory.
"""
