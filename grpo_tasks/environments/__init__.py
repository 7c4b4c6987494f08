"""Tools and environments: what answers the policy between two turns of a conversation, in worker processes with limits.

    rollout --turns--> pool.py  ==process==  serve.py --> forms.py --> the user's code
                          |
                       calls.py: the calls of a turn

contract.py is the page to read first. Tokens are not known here: a rollout makes them of the messages, and escapes markers in
what others say.
"""
