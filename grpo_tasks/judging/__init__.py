"""A language model as a reward: questions, verdicts, and what lies between them.

    completion -> frame.py (prompt) -> client.py (endpoint) -> frame.py (strict verdict) -> judge.py (votes, scores)
                      store.py: every verdict with its prompt, a question is asked once; limits of all processes

A completion is text of the policy that is trained to please the judge. It enters the prompt as data only. This room knows no
rewards, rows or stages: it gets texts and returns numbers.
"""
