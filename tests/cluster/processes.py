"""The processes on the nodes of a test, known by a variable that they inherit from their node."""

import importlib.util
import os

import psutil

OWN = "GRPO_TEST_NODES_OF"
MARK = {OWN: str(os.getpid())}
"""For `nodes.add`: the node and all that it starts belong to this test process."""

ACTORS = ("JobNode", "ServerNode")
[RAY] = importlib.util.find_spec("ray").submodule_search_locations if importlib.util.find_spec("ray") else ["/nowhere"]


def of_this_test():
    """Everything on the nodes, Ray's processes too."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(OWN) == str(os.getpid()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def not_of_ray():
    """The processes on the nodes that only runs start: their actors and whatever these have started."""
    found = []
    for process in of_this_test():
        try:
            if not is_of_ray(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue  # it has ended meanwhile
    return found


def is_of_ray(command):
    """Whether a command line is Ray's own: a program of its package, an agent, or a worker without an actor of ours."""
    if command and command[0].startswith("ray::"):
        return not any(actor in command[0] for actor in ACTORS)
    return any(part.startswith(f"{RAY}/") for part in command)


def lines_of(processes):
    """Command lines, for the message of a failed test."""
    found = []
    for process in processes:
        try:
            found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found
