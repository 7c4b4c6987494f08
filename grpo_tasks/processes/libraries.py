"""Import transformers and peft in two thirds of the time. Call `import_libraries` before anything else imports them.

It hides two optional libraries while transformers and peft are imported, and only with a CPU build of torch. A 4-bit model finds
bitsandbytes afterwards as usual.
"""

import importlib
import sys

import torch

LIBRARIES = ("transformers.models.auto.modeling_auto", "peft")
OPTIONAL = ("bitsandbytes", "sklearn")
"""Slow imports of those two, for features that are rarely used on a CPU."""
CACHED_CHECKS = (
    ("peft.import_utils", "is_bnb_available"),
    ("peft.import_utils", "is_bnb_4bit_available"),
    ("transformers.utils.import_utils", "is_bitsandbytes_available"),
)
"""Functions that cache whether bitsandbytes is installed. A 4-bit base model needs the true answer later."""


def import_libraries() -> None:
    """Import both without the optional libraries; do nothing with a GPU build of torch, or when peft is imported already."""
    if torch.version.cuda is not None or torch.version.hip is not None or "peft" in sys.modules:
        return
    hidden = [name for name in OPTIONAL if name not in sys.modules]
    # The import system takes None in sys.modules for "not installed".
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]
    for name in LIBRARIES:
        importlib.import_module(name)
    for name in hidden:
        del sys.modules[name]
    for module, name in CACHED_CHECKS:
        getattr(sys.modules[module], name).cache_clear()
