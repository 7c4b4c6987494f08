"""Messages to the actors on the nodes: what is asked, what is sent, and how a death shows."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from grpo_tasks.cluster.inbox import CHUNK_BYTES
from grpo_tasks.cluster.node import NodeFacts
from grpo_tasks.cluster.parcel import ParcelFile
from schemas.errors import ClusterError, DiskFullError, UserError, disk_full

ANSWER_S = 60.0
"""A node that does not answer within so many seconds is lost. Ray notices most deaths at once."""
START_S = 300.0
"""Longest wait for the actors to start."""


class NodeLost(Exception):  # noqa: N818 - it names what happened
    """A node, an actor or a rank died without an error of ours."""


@dataclass(frozen=True, slots=True)
class Member:
    """An actor and what is known of its node."""

    actor: Any
    facts: NodeFacts


def ask(ref: Any, name: str, patience_s: float = ANSWER_S) -> Any:
    """The answer of a node.

    Raises:
        NodeLost: it is gone, or does not answer in time.
        UserError: the one that it raised, or its disk is full.
        ClusterError: its actor cannot start there; another attempt would end in the same way.
    """
    try:
        return ray.get(ref, timeout=patience_s)
    except RayTaskError as error:
        if isinstance(error.cause, UserError):
            raise error.cause from None
        if disk_full(error):
            raise full_disk(name) from error
        raise
    except RayActorError as error:
        if not error.actor_init_failed:
            raise _lost(name, error) from error
        last = str(error).strip().splitlines()[-1]
        raise ClusterError(
            f"{name} cannot run our code: {last}",
            place="resources.cluster",
            fix="install this project there with the same versions and restart Ray; `grpo cluster` compares all nodes",
        ) from error
    except RayError as error:
        raise _lost(name, error) from error


def full_disk(name: str) -> DiskFullError:
    """The error for a node without space."""
    fix = "free some space there, then run the same command again: it continues from the last checkpoint"
    return DiskFullError(f"the disk of {name} is full", place=name, fix=fix)


def _lost(name: str, error: RayError) -> NodeLost:
    reason = next(iter(str(error).strip().splitlines()), "")
    return NodeLost(f"{name} is lost ({type(error).__name__}: {reason})")


def send(files: tuple[ParcelFile, ...], members: Sequence[Member]) -> None:
    """Send each file, in parts, to the nodes that lack its content; one copy in the object store serves all of them."""
    asked = [(member, member.actor.missing.remote(files)) for member in members]
    missing = [(member, ask(ref, member.facts.name, START_S)) for member, ref in asked]
    for file in {file.sha256 if file.is_input else f"{file.sha256}+": file for file in files}.values():
        receivers = [member for member, hashes in missing if file.sha256 in hashes]
        if not receivers:
            continue
        with Path(file.source).open("rb") as stream:
            for offset in range(0, max(1, file.size), CHUNK_BYTES):
                part = ray.put(stream.read(CHUNK_BYTES))
                sent = [(member, member.actor.receive.remote(file, offset, part)) for member in receivers]
                for member, ref in sent:
                    ask(ref, member.facts.name, START_S)
