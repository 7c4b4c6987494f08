"""The language model of tests marked `real` and of `make bench-real`: a folder, or made once by ../shared/models/smollm2.py."""

import subprocess
import sys
import tempfile
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "shared" / "models" / "smollm2.py"


def real_model_folder(given: str | None) -> Path:
    """Folder of the model: `given`, or SmolLM2-135M-Instruct in the machine's folder for temporary files.

    Raises:
        FileNotFoundError: there is no model, and nothing to make one with.
    """
    from grpo_tasks.kit.files import replacing
    from grpo_tasks.kit.lock import file_lock

    folder = Path(given or Path(tempfile.gettempdir()) / "smollm2").resolve()
    if (folder / "config.json").is_file():
        return folder
    if given or not SCRIPT.is_file():
        raise FileNotFoundError(f"{folder} holds no model, and ../shared/models/smollm2.py makes one only where it is")
    with file_lock(folder.with_name(f".{folder.name}.lock")):
        if not (folder / "config.json").is_file():
            with replacing(folder) as unfinished:
                subprocess.run([sys.executable, SCRIPT, unfinished], check=True)
    return folder
