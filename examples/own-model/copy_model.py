"""Writes the folder model/: a copy of the model inside the project, in the place of a model of your own.

A model folder holds config.json, weights as safetensors, and a tokenizer with a chat template, as `save_pretrained` writes them.
"""

import shutil
from importlib.resources import as_file, files
from pathlib import Path

if __name__ == "__main__":
    with as_file(files("grpo_tasks.demo") / "base") as source:
        shutil.copytree(source, Path(__file__).with_name("model"), dirs_exist_ok=True)
