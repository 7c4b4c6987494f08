"""Stages that train by cross entropy: on demonstrations (kind sft), or on the policy's own best completions (kind rejection).

demonstrations.py   a row of the data -> a text or messages, or the reason why there is none
demonstrations.py            messages -> token ids, and which of them the assistant wrote
trainer.py          the loss: cross entropy of the trained tokens
trainer.py        which completions of a group are trained on
trainer.py          the loop of grpo/trainer.py with other rounds and this loss

Everything else is the engine's: prompts, packed rows, adapter, optimizer, checkpoints, guards, journal. What this room does not
do: read the data, or sample.
"""
