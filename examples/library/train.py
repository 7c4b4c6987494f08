"""Train, merge, evaluate and ask a model from Python, without Prefect and MLflow.

python train.py                                  # 20 updates on the embedded model
python train.py stages.0.max_steps=100           # any override of the config
"""

import sys

from grpo_tasks.library import evaluate, generate, load_data, merge, train_stage
from schemas.config.load import load_config


def brief(completions, **columns):
    """1 for a completion of fewer than 80 characters."""
    return [1.0 if len(completion[0]["content"]) < 80 else 0.0 for completion in completions]


config = load_config("demo", ["stages.0.max_steps=20", *sys.argv[1:]])
data = load_data(config, "work/data")
stage = train_stage(config, "format", data, "work/format", rewards={"brief": brief})
merged = merge(config, stage.model, data, "work/merged")
print(evaluate(config, merged.model, data, "work/evaluation").metrics["format_rate"])
print(generate(config, merged.model, ["What is 15 + 27?"]))
