"""Goes through the zoo and says of each model what the pipeline does with it.

python -m tests.zoo [NAME ...]          one line a model
python -m tests.zoo --write [NAME ...]  writes the verdicts into table.json
"""

import sys
import tempfile
from pathlib import Path

import torch
import transformers

from tests.zoo.kinds import ZOO
from tests.zoo.measure import measure

if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for name in [argument for argument in sys.argv[1:] if not argument.startswith("-")] or ZOO:
        with tempfile.TemporaryDirectory() as folder:
            try:
                verdict = measure(name, Path(folder), attention="eager" if "--eager" in sys.argv else "sdpa")
            except Exception as error:
                print(f"{name:28} NOT BUILT  {type(error).__name__} {str(error)[:300]}", flush=True)
                continue
        print(f"{name:28} {verdict.way:10} {' | '.join(verdict.faults or verdict.sentences)}", flush=True)
        if "-v" in sys.argv:
            print("      ", {what: f"{value:.2g}" for what, value in verdict.differences.items()}, flush=True)
