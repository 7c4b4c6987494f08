"""`python -m grpo_tasks.rollout DIRECTORY`: sample what DIRECTORY/spec.json asks for into DIRECTORY/completions.parquet."""

from pathlib import Path

from grpo_tasks.rollout.sample import SampleSpec, sample
from schemas.child import SPEC, run_child


def main(directory: Path) -> None:
    """Sample and write the table."""
    sample(SampleSpec.load(directory / SPEC)).write_parquet(directory / "completions.parquet")


if __name__ == "__main__":
    run_child(main)
