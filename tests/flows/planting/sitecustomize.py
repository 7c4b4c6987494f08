"""A fault of our own code, planted into every process that has this folder in PYTHONPATH; PLANTED names it.

It is planted as soon as the module it belongs to has been imported (test_planted_models.py).
"""

import importlib.abc
import importlib.util
import os
import sys


def bare_head(head):
    """The logits are the output layer's: without scale, cap and whatever else the model does after it."""
    head.OwnHead.forward = lambda self, hidden: self.rest["lm_head_"](hidden)


def no_adapter(folded):
    """The copy that is sampled from leaves the adapter out."""
    folded.folded_weight = lambda layer: layer.base_layer.weight.float()


FAULTS = {
    "bare head": ("grpo_tasks.policy.logprobs", bare_head),
    "no adapter": ("grpo_tasks.policy.folded_adapter", no_adapter),
}


class Planting(importlib.abc.MetaPathFinder):
    """Finds one module, as others do, and changes it once it has been executed."""

    def __init__(self, name, plant):
        self.name, self.plant = name, plant

    def find_spec(self, fullname, path, target=None):  # noqa: ARG002 - importlib's signature
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def planted(module):
            execute(module)
            self.plant(module)

        spec.loader.exec_module = planted
        return spec


if "PLANTED" in os.environ:
    sys.meta_path.insert(0, Planting(*FAULTS[os.environ["PLANTED"]]))
