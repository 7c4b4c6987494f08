"""`python -m grpo_tasks.rollout DIRECTORY`: sample completions as DIRECTORY/spec.json says, into samples.parquet."""

from pathlib import Path

from grpo_tasks.kit.files import replacing
from grpo_tasks.processes.child import SPEC, run_child
from grpo_tasks.rollout.sample_table import sample_table
from grpo_tasks.rollout.spec import SAMPLES, SampleSpec


def main(directory: Path) -> None:
    """Sample the completions and write the table."""
    table = sample_table(SampleSpec.load(directory / SPEC), directory)
    # Complete as soon as it has its name: on a node of a cluster it is sent at once (cluster/mirror.py).
    with replacing(directory / SAMPLES) as unfinished:
        table.write_parquet(unfinished)


if __name__ == "__main__":
    run_child(main)
