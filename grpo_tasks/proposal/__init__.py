"""Proposes a config for a data file that nobody has described yet.

propose.py   which columns hold the question, the chat and the answer
propose.py   where the ground truth stands in the answer, and how two answers are compared
propose.py   tries the candidates on the file, with the readers and rules of the pipeline itself
config_text.py  the proposal as a commented YAML config

It asks nobody anything and writes no config file: `grpo init` does. It does not judge data either: grpo_tasks/data does.
"""
