"""The second engine: the same stage handed to TRL's GRPOTrainer, `python -m grpo_tasks.trl_engine STAGE_DIR`.

For users who need a feature of TRL that our engine lacks, and the reference of the parity tests. Data, rewards, adapter, journal,
tables and result are ours; rollouts, loss and checkpoints are TRL's.
"""
