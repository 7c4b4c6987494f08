"""A stage on the nodes of a Ray cluster, which need no disk in common with the driver. The only room that imports Ray.

    driver (python -m grpo_tasks.cluster STAGE_DIR, child of the step)            node (one actor each)
      parcel.py      spec, inputs, checkpoints, journal  --by content, in chunks-->  parcel.py, node.py: a private stage directory
      supervisor.py  placement, liveness, restarts                                   node.py: `python -m grpo_tasks.grpo` per rank
      inbox.py       the stage directory, the truth      <--as they are made------   outbox.py: journal, log, checkpoints, result

connect.py joins a running cluster, never starts one, and holds what `grpo cluster` shows. versions.py says whether a node runs
the same code. servers.py keeps rollout servers alive, each in an actor of server_node.py. janitor.py removes the private folder
when an actor ends, however it ends. Ray does placement, liveness and transport. Training, resuming and the meaning of every file
are those of a stage on one machine.
"""
