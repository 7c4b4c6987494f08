"""`python -m tests.grpo.work_on_card FOLDER`: on the pretend card, merge as merge.json says and sample as sample.json says."""

import sys
from pathlib import Path

from tests.grpo.pretend_card import CARD, card  # first: it names the device

# isort: split
from grpo_tasks.policy.merge import merge
from grpo_tasks.rollout import sample_table
from grpo_tasks.rollout.spec import SampleSpec
from schemas.results.model import MergeSpec


def main(folder: Path) -> None:
    sample_table.pick_device = lambda _: CARD
    with card():
        merge(MergeSpec.load(folder / "merge.json"), folder / "merged", device=CARD).save(folder / "figures.json")
        spec = SampleSpec.load(folder / "sample.json")
        sample_table.sample_table(spec, folder).write_parquet(folder / "samples.parquet")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
