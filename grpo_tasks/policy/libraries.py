"""Import transformers and peft in two thirds of the time: call `import_libraries` before anything else imports them.

With a CPU build of torch only. A model in 4 bits finds bitsandbytes afterwards as if nothing had been left out.
"""

import importlib
import sys

import torch

LIBRARIES = ("transformers.models.auto.modeling_auto", "peft")
SPARED = ("bitsandbytes", "sklearn")
"""What those two import where it is installed, for things that hardly anybody does on a CPU."""
ANSWERS = (
    ("peft.import_utils", "is_bnb_available"),
    ("peft.import_utils", "is_bnb_4bit_available"),
    ("transformers.utils.import_utils", "is_bitsandbytes_available"),
)
"""Functions that remember whether bitsandbytes is there: a base in 4 bits needs the truth."""


def import_libraries() -> None:
    """Import both, without the spared ones; does nothing with a torch for a GPU, or where they are imported already."""
    if torch.version.cuda is not None or torch.version.hip is not None or "peft" in sys.modules:
        return
    spared = [name for name in SPARED if name not in sys.modules]
    # None among the modules means "not installed" to whoever asks.
    sys.modules.update(dict.fromkeys(spared))  # type: ignore[arg-type]
    for name in LIBRARIES:
        importlib.import_module(name)
    for name in spared:
        del sys.modules[name]
    for module, name in ANSWERS:
        getattr(sys.modules[module], name).cache_clear()
