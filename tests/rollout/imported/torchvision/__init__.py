"""Names of torchvision, whose build on PyPI needs CUDA. vLLM imports some with Qwen3.5, and uses none for its text model."""

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from unittest.mock import MagicMock


class Names(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Every module below this one, with every name."""

    def find_spec(self, name, *_):
        mine = name.startswith(f"{__name__}.")
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if mine else None

    def create_module(self, spec):
        module = ModuleType(spec.name)
        module.__getattr__ = lambda _: MagicMock()
        return module

    def exec_module(self, module):
        pass


__version__ = "0.28.0"
sys.meta_path.append(Names())
