"""Goes through the zoo and says of each model what the pipeline does with it.

python -m tests.zoo [NAME ...]          one line a model; -v adds every difference
python -m tests.zoo --write [NAME ...]  writes the verdicts into table.json, from which docs/models.md is made
"""

import sys
import tempfile
from pathlib import Path

import torch
import transformers

from tests.zoo.kinds import ZOO
from tests.zoo.measure import measure, write


def main(arguments: list[str]) -> None:
    """Measure the named models, or all."""
    names = [argument for argument in arguments if not argument.startswith("-")] or list(ZOO)
    for name in names:
        with tempfile.TemporaryDirectory(prefix="zoo-") as folder:
            verdict = measure(name, Path(folder))
        print(f"{name:28} {verdict.way:10} {' | '.join(verdict.faults or verdict.sentences)}", flush=True)
        if "-v" in arguments:
            print("      ", {what: f"{value:.2g}" for what, value in verdict.differences.items()}, flush=True)
        if "--write" in arguments:
            write(verdict)


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    main(sys.argv[1:])
