"""Merges an adapter in a child process, and returns the proof that the merged model is the same policy; imports no torch."""

import time
from pathlib import Path

from grpo_tasks.processes.child import RESULT, SPEC, run_module
from schemas.results.model import MergeFigures, MergeProof, MergeSpec, ModelRef

PROOF_PROMPTS = 16
"""Held-out prompts that the merged model is compared on."""


def merge_and_prove(spec: MergeSpec, directory: Path, *, key: str) -> MergeProof:
    """Merge in float32, save, reload and compare; `directory` exists and gets spec.json, log.txt and model/.

    Raises:
        MergeError: the merged or the saved model differs from base + adapter, or the precision of the config keeps too little of
            what training changed.
    """
    began = time.perf_counter()
    spec.save(directory / SPEC)
    run_module("grpo_tasks.policy", directory)
    figures = MergeFigures.load(directory / RESULT)
    return MergeProof(
        key=key,
        directory=directory,
        seconds=time.perf_counter() - began,
        model=ModelRef(path=str(directory / "model"), sha256=figures.sha256),
        policy=spec.ref,
        **figures.model_dump(),
    )
