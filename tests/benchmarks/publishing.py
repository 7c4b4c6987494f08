"""`python -m tests.benchmarks.publishing [RUNS]`: how long the step publish_model takes for a model of the demo's size.

The model, 1.2 MiB, is merged and evaluated once. Then it is published RUNS times (5), each time into a new, empty SQLite store:
log the files, load and ask the artifact, register it, test it, decide. The libraries are imported before, as in the pipeline.
"""

import os
import statistics
import sys
import tempfile
from pathlib import Path

from flows.cli.environment import prepare_environment
from flows.flow_run import open_flow_run
from flows.steps import base_model, evaluation_of, validated_data
from grpo_tasks.steps.merge_adapter import merge_adapter
from grpo_tasks.steps.publish_model import publish_model
from grpo_tasks.tracking.publishing import prepare_publishing
from schemas.config.load import load_config

SETTINGS = ["evaluation.max_prompts=16", "evaluation.num_samples=1", "resources.device=cpu"]


def published(store: Path) -> tuple[float, float]:
    """Seconds of the step, and the size of the model in MiB. Everything before it is skipped from the second call on."""
    config = load_config("demo", [*SETTINGS, f"tracking.tracking_uri=sqlite:///{store}"])
    with open_flow_run(config, flow="publishing") as run:
        prepare_publishing()
        data, model = validated_data(run), base_model(config)
        merged = merge_adapter(run, config, model, data)
        rival, final = (evaluation_of(run, label, ref, data) for label, ref in (("base", model), ("merged", merged.model)))
        made = publish_model(run, config, merged, final, [rival], policy=final, champion=None)
        assert made.model_version == "1", "the store was not empty"
        return made.seconds, merged.size_bytes / 2**20


def main(runs: int) -> None:
    """Publish into one store after the other, and print the median."""
    with tempfile.TemporaryDirectory(prefix="publishing-") as folder:
        os.chdir(folder)
        prepare_environment(servers=False)
        measured = [published(Path(folder) / f"store-{number}.db") for number in range(runs)]
    seconds = [one for one, _ in measured]
    each = ", ".join(f"{one:.1f}" for one in seconds)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; each: {each} s")
    print(f"publish_model, {measured[0][1]:.1f} MiB, median of {runs}: {statistics.median(seconds):.1f} s")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
