"""`python -m flows.sweeps.process DIRECTORY`: the process of one run of a sweep (variant.py)."""

import os
from pathlib import Path

from grpo_tasks.processes.child import SPEC, run_child
from schemas.results.sweep import VariantSpec

MODULE = "flows.sweeps.process"


def main(folder: Path) -> None:
    """Run the variant that spec.json describes; result.json says how it ended."""
    spec = VariantSpec.load(folder / SPEC)
    if spec.prefect_api is not None:
        # Before Prefect is imported, which reads it once. A temporary server is known to the sweep only.
        os.environ["PREFECT_API_URL"] = spec.prefect_api
    from flows.sweeps.variant import run_variant

    run_variant(spec)


if __name__ == "__main__":
    run_child(main)
