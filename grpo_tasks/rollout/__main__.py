"""`python -m grpo_tasks.rollout DIRECTORY`: sample completions as DIRECTORY/spec.json says, into samples.parquet."""

from pathlib import Path

from grpo_tasks.processes.entry import SPEC, run_child
from grpo_tasks.rollout.sample_table import sample_table
from grpo_tasks.rollout.spec import SAMPLES, SampleSpec


def main(directory: Path) -> None:
    """Sample the completions and write the table."""
    sample_table(SampleSpec.load(directory / SPEC), directory).write_parquet(directory / SAMPLES)


if __name__ == "__main__":
    run_child(main)
