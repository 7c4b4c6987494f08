"""`python -m grpo_tasks.cluster.sampling DIRECTORY`: what `python -m grpo_tasks.rollout DIRECTORY` does, on a cluster."""

from pathlib import Path

from grpo_tasks.cluster.connect import connected
from grpo_tasks.cluster.sampling.supervisor import SamplingSupervisor
from grpo_tasks.processes.entry import SPEC, run_child
from grpo_tasks.rollout.spec import SAMPLES, SampleSpec


def main(directory: Path) -> None:
    """Sample the completions and write the table."""
    spec = SampleSpec.load(directory / SPEC)
    with connected(spec.resources.cluster.address):
        SamplingSupervisor(directory.resolve(), spec).sample().write_parquet(directory / SAMPLES)


if __name__ == "__main__":
    run_child(main)
