"""The GRPO pipeline: one file of steps/ is a step, the other folders are the rooms of the library behind the steps."""

import logging

# On some CPUs bitsandbytes asks, wherever it is imported, for a package that 4-bit models on a CPU could use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
