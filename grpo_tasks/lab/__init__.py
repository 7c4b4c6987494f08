"""The reward lab: every reward function is tried before any training, on made-up completions and on samples of the base model.

    rows -> probes.py -> function_checks.py, judge_checks.py -> run.py (sum of each stage, forecast of its signal) -> report.py
    environment_checks.py plays with tools and environments

The lab finds functions that break their contract, are slow, or pay for cheating. It does not prove that a reward is good.
"""
