"""`python -m grpo_tasks.policy DIRECTORY`: merge the adapter of DIRECTORY/spec.json into DIRECTORY/model and result.json.

Always on the CPU. The weights are in float32 there, two to seven times as large as those that were trained, so a card that
trained the model may not hold them; and the bytes of the merged model depend on no card.
"""

from pathlib import Path

from grpo_tasks.policy.load import pick_device
from grpo_tasks.policy.merge import merge
from grpo_tasks.processes.child import RESULT, SPEC, run_child
from schemas.config.operations import ResourcesConfig
from schemas.results.model import MergeSpec


def main(directory: Path) -> None:
    """Merge the adapter and write the figures of the proof."""
    spec = MergeSpec.load(directory / SPEC)
    resources = ResourcesConfig(device="cpu", num_threads=spec.num_threads)
    merge(spec, directory, device=pick_device(resources)).save(directory / RESULT)


if __name__ == "__main__":
    run_child(main)
