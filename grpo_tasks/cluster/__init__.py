"""A stage on the nodes of a Ray cluster, which need no disk in common with the driver. The only room that imports Ray.

    driver (python -m grpo_tasks.cluster STAGE_DIR, child of the step)            node (one actor each)
      parcel.py      spec, inputs, checkpoints, journal  --by content, in chunks-->  parcel.py, node.py: a private stage directory
      supervisor.py  placement, liveness, restarts                                   node.py: `python -m grpo_tasks.grpo` per rank
      inbox.py       the stage directory, the truth      <--as they are made------   outbox.py: journal, log, checkpoints, result

It joins a running cluster and never starts one (connect.py). The meaning of every file is that of a stage on one machine.
"""
