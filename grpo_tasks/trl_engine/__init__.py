"""The second engine: the same stage handed to TRL's GRPOTrainer, `python -m grpo_tasks.trl_engine STAGE_DIR`.

For those who need something of TRL's that ours lacks, and the oracle of the parity tests. Data, rewards, adapter, journal, tables
and result are ours; rollouts, loss and checkpoints are TRL's.
"""
