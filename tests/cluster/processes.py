"""The processes on the nodes of a test, known by a variable that they inherit from their node."""

import importlib.util
import os
from contextlib import suppress

import psutil

OWN = "GRPO_TEST_NODES_OF"
MARK = {OWN: str(os.getpid())}
"""For `nodes.add`: the node and all that it starts belong to this test process."""

ACTORS = ("JobNode", "ServerNode")
[RAY] = importlib.util.find_spec("ray").submodule_search_locations if importlib.util.find_spec("ray") else ["/nowhere"]


def found(wanted):
    """The processes on the nodes, Ray's too, for which `wanted` holds; oldest first."""
    here = []
    for process in psutil.process_iter():
        # It may end at any moment.
        with suppress(psutil.Error):
            if process.environ().get(OWN) == str(os.getpid()) and wanted(process):
                here.append((process.create_time(), process))
    return [process for _, process in sorted(here, key=lambda each: each[0])]


def running(module):
    """Those that are `python -P -m MODULE` or `python -m MODULE`."""
    return found(lambda process: [part for part in process.cmdline() if part != "-P"][1:3] == ["-m", module])


def not_of_ray():
    """Those that only runs start: their actors and whatever these have started."""
    return found(lambda process: not is_of_ray(process.cmdline()))


def is_of_ray(command):
    """Whether a command line is Ray's own: a program of its package, an agent, or a worker without an actor of ours."""
    if command and command[0].startswith("ray::"):
        return not any(actor in command[0] for actor in ACTORS)
    return any(part.startswith(f"{RAY}/") for part in command)


def lines_of(processes):
    """Command lines, for the message of a failed test."""
    lines = []
    for process in processes:
        with suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    return lines
