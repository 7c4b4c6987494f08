"""A language model as a reward: questions, verdicts, and what lies between them.

    completion -> frame.py (prompt) -> client.py (endpoint) -> verdict.py (strict) -> score
                        store.py: every verdict with its prompt; a question is asked once

judge.py    points or comparisons, votes, scores
trial.py    agreement with people, bias and cost, before any training

A completion is text of the policy that is trained to please the judge. It enters the prompt as data only. This room knows no
rewards, rows or stages: it gets texts and returns numbers.
"""
