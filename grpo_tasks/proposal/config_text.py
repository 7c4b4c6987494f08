"""A proposal as a commented YAML config. It is checked before it is returned, so what is written can be loaded."""

import json
import re

from grpo_tasks.proposal.propose import COMPLETION_TOKENS, SYSTEM_PROMPT, Proposal, data_settings
from schemas.config.load import check_config, parse_yaml

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_YAML_WORDS = {"null", "true", "false", "yes", "no", "on", "off", "y", "n"}
_MEANINGS = {
    "question": "template that joins columns into the question",
    "question_column": "column with the question",
    "prompt_column": "column with chat messages",
    "answer_column": "column with the ground truth",
    "answer_pattern": "its first group is the ground truth",
}


def config_text(proposal: Proposal, *, name: str, model: str, config_path: str) -> str:
    """The config for a proposal.

    Args:
        proposal: what was found in the data file.
        name: name of the run and of the registered model.
        model: hub id, folder or registered name of the base model.
        config_path: where the text will be saved; its first lines say how to use it.
    """
    text = "\n".join([_head(name, model, config_path), _data(proposal), _checks(proposal), _training(proposal)])
    check_config(parse_yaml(text, place=config_path), place=config_path)
    return text


def _head(name: str, model: str, config_path: str) -> str:
    return f"""\
# Written by grpo init. Paths are relative to the folder where you call grpo.
#   grpo validate {config_path}    checks every row
#   grpo rewards {config_path}     tests the rewards, without any training
#   grpo run {config_path}         trains, evaluates and registers the model
# grpo fields WORD explains every setting.

name: {_scalar(name)}    # folder below runs/, MLflow experiment and registered model
seed: 42

model:
  path: {_scalar(model)}    # a folder, a hub id such as Qwen/Qwen2.5-0.5B-Instruct, or a registered model NAME@champion;
                            # embedded:base is a tiny model that runs anywhere and knows only small sums
  lora: {{r: 16, lora_alpha: 32}}    # null: train every weight
"""


def _data(proposal: Proposal) -> str:
    lines = ["data:", f"  train: [{{path: {_scalar(proposal.train)}}}]"]
    if proposal.eval:
        lines.append(f"  eval: [{{path: {_scalar(proposal.eval)}}}]    # held-out rows")
    else:
        lines.append("  eval_fraction: 0.1    # share of the rows that is held out for evaluation")
    lines.append(f"  # columns of the file: {_comment(', '.join(proposal.columns))}")
    for key, value in data_settings(proposal.choice, proposal.columns, proposal.pattern).items():
        meaning = proposal.pattern_meaning if key == "answer_pattern" else _MEANINGS[key]
        if key == "answer_column" and value is None:
            meaning = "the file has no ground truth"
        if value == "no_prompt_column":
            meaning = "the column `prompt` is not used"
        lines.append(f"  {key}: {_scalar(value)}    # {_comment(meaning)}")
    lines.append(f"  system_prompt: {_scalar(SYSTEM_PROMPT)}    # names the tags of section completion")
    return "\n".join(lines) + "\n"


def _checks(proposal: Proposal) -> str:
    found = f"{proposal.refused:,} of {proposal.rows:,} rows of this file are refused"
    reasons = "".join(f"\n  # {_comment(reason)}" for reason in proposal.reasons)
    equality = (
        f"\ncompletion:\n  equality: {proposal.equality}    # exact | numeric | math | choice\n" if proposal.choice.answer else ""
    )
    return f"""\
validation:
  max_prompt_length: {proposal.max_prompt_length}    # tokens; longer prompts are quarantined, never cut
  max_invalid_fraction: {proposal.max_invalid_fraction}    # {found}; more stop the run{reasons}
{equality}
rollout:
  max_completion_length: {COMPLETION_TOKENS}    # tokens
  temperature: 1.0
"""


def _training(proposal: Proposal) -> str:
    second = "[format, correctness]    # correctness compares with the ground truth" if proposal.choice.answer else ""
    own = "    # add your own: rewards.functions.NAME.function: 'module:function'"
    stages = f"""\
stages:
  - &stage
    name: format    # first learn the tags ...
    rewards: [incremental_format, format]{"" if second else own}
    max_steps: 50
    num_generations: 8    # completions per prompt
    per_device_train_batch_size: 16    # completions per pass
    learning_rate: 1.0e-4
    beta: 0.01    # strength of the KL penalty
"""
    if second:
        stages += f"""\
  - <<: *stage
    name: correctness    # ... then right answers, from the model of the first stage
    rewards: {second}
    max_steps: 100
"""
    return stages + "\nevaluation: {max_prompts: 64, num_samples: 4}\n"


def _scalar(value: object) -> str:
    """A YAML scalar in one line: bare where that is safe, in double quotes otherwise."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _YAML_WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)


def _comment(text: str) -> str:
    """Text for a comment: one line, of bounded length."""
    line = " ".join(text.split())
    return line if len(line) <= 150 else line[:149] + "…"
