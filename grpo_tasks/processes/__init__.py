"""Child processes: how they are started, identified, supervised, spoken to, and ended with the process that started them.

child.py              run_module: `python -m MODULE DIRECTORY` for a step; forks from fork_server.py
entry.py              run_child: the other end of it, with the file names in DIRECTORY
lifetime.py           a child dies with its parent, however the parent ends; a process by its pid and start time
serve.py              a server (vLLM, Prefect's) with everything it starts, as one process group; wait until it answers
worker_process.py     a process that runs a user's code, asked for typed replies, every wait with a deadline
worker_main.py        the other end of it; worker_supervisor.py limits it and cleans up; framing.py: what they all speak
ports.py, signals.py  free ports; signals that end a process, as exceptions
libraries.py          imports transformers and peft fast

What the processes compute is not here. Only fork_server.py and libraries.py import torch; the others start at once.
"""
