"""Child processes: how they are started, supervised, spoken to, and ended with the process that started them.

lifetime.py        start_module, wait_until; a child dies with its parent, however that ends; signals as exceptions
child.py           the heavy work of a step, in children that fork_server.py forks with transformers and peft imported already
serve.py           a server (vLLM, Prefect's) with everything it starts, as one process group; free ports
worker_process.py  a process that runs a user's code, asked for typed replies; worker_main.py is the other end of it,
                   worker_supervisor.py limits it and cleans up

Other rooms call these. Only the servers of `grpo up`, which outlive the command (operating/servers.py), and the last shell of a
cluster node (cluster/jobs.py) start by other means. What the processes compute is not here.
"""
