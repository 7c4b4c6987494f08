"""The reward lab: every reward function is tried before any training, on made-up completions and on samples of the base model.

    probes.py -> probe_set.py -> function_checks.py -> run.py -> run.py -> report.py
                                   (one function)      (sum of a stage)    (all)

The lab finds functions that break their contract, are slow, or pay for cheating. It does not prove that a reward is good.
"""
