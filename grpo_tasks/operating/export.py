"""A registered model as one adapter of its original base (`grpo export`), compared with the policy that was trained last.

The stages of one run train one adapter, each from where the stage before ended. A run that starts from a registered model trains
a new one on the merged weights, so such a chain has several.
"""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

from grpo_tasks.data.table import read_chats
from grpo_tasks.kit.files import replacing
from grpo_tasks.tracking.models import download_adapter, fetch_version
from grpo_tasks.tracking.registry import find_version, lineage_of, recorded_config
from grpo_tasks.tracking.store import open_store
from schemas.config.load import check_recorded
from schemas.config.model import ModelConfig
from schemas.config.operations import TrackingConfig
from schemas.errors import ModelError
from schemas.paths import resolve
from schemas.results.model import PROOF_PROMPTS, ModelRef, percent
from schemas.results.publication import Lineage

CHAT_TEMPLATE = "chat_template.jinja"
_DOWNLOADED = re.compile(r"(?P<name>.+)-(?P<version>[0-9]{1,9})-(?P<run>[0-9a-f]{8})")
"""Name of the folder into which a run downloads the registered model that it starts from."""


@dataclass(frozen=True, slots=True)
class Link:
    """A registered version and how it was trained."""

    lineage: Lineage
    model: ModelConfig

    @property
    def version(self) -> str:
        """NAME/VERSION."""
        return f"{self.lineage.name}/{self.lineage.version}"


def export_adapter(reference: str, into: Path, tracking: TrackingConfig) -> str:
    """Write the adapter to the new folder `into`, whole or not at all; what is there now, and how vLLM serves it, as text.

    `ModelError`: no such version, one that was not trained by low-rank matrices alone, or `into` holds files. `MergeError`: base
    + adapter has less than 95 % of what training changed. `TrackingError`: the store cannot be reached.
    """
    if into.exists() and (not into.is_dir() or any(into.iterdir())):
        raise ModelError("the folder holds other files", place=str(into), fix="name a new folder, or empty this one")
    links = chain_of(reference, tracking)
    with replacing(into) as made:
        # Below the new folder, so that a killed export leaves one folder, which the next one removes.
        scratch = made / "scratch"
        scratch.mkdir(parents=True)
        adapters = [download_adapter(link.version, tracking, scratch / "adapters") for link in links]
        merged = _fetched(links[-1], tracking, scratch / "merged")
        held_out = open_store(tracking).download(links[-1].lineage.run_id, "data/eval.parquet", scratch)
        if held_out is None:
            raise ModelError(f"the run of {links[-1].version} has no held-out prompts to compare on", place=reference)
        from grpo_tasks.policy.stacked_adapter import prove_stack, stack_adapters, vllm_rank

        base, stack = ModelRef(path=links[0].model.path, revision=links[0].model.revision), scratch / "stack"
        rank = stack_adapters(adapters, base, stack)
        prompts = read_chats(held_out, limit=PROOF_PROMPTS)
        start = base if len(links) == 1 else ModelRef(path=str(_fetched(links[-2], tracking, scratch / "start")))
        policy = start.model_copy(update={"adapter": adapters[-1]})
        proof = prove_stack(stack, base, policy, merged, prompts)
        if (merged / CHAT_TEMPLATE).is_file():
            shutil.copy(merged / CHAT_TEMPLATE, stack)
        for file in stack.iterdir():
            shutil.move(file, made)
        shutil.rmtree(scratch)
        if into.exists():
            # Fails where somebody has put files there meanwhile.
            into.rmdir()
    return (
        f"{links[-1].version}: {into}, rank {rank}, adapters stacked: {len(adapters)}\n"
        f"{proof.prompts} held-out prompts: base + adapter has {percent(proof.kept)} of what training changed\n"
        f"nats per token from the policy: base + adapter {proof.stack.mean:.2g}, merged model {proof.merged.mean:.2g}, "
        f"base {proof.base.mean:.2g}\n"
        f"vllm serve {resolve(base.path)} --enable-lora --max-lora-rank {vllm_rank(rank)} "
        f"--lora-modules {links[-1].lineage.name}={into}"
    )


def chain_of(reference: str, tracking: TrackingConfig) -> list[Link]:
    """The versions that a version was made from, oldest first; `ModelError` if one is missing, or can be part of no adapter."""
    links: list[Link] = []
    while reference:
        lineage = lineage_of(reference, tracking)
        place = f"config.yaml of run {lineage.run_id}"
        link = Link(lineage, check_recorded(recorded_config(lineage, tracking), place=place).model)
        fix = f"serve the complete model: grpo download {link.version} DIR"
        if link.model.lora is None:
            raise ModelError(
                f"{link.version} was trained in full (model.lora: null): what it learned is no product of low-rank matrices, so "
                "no adapter holds it",
                place="model.lora",
                fix=fix,
            )
        if link.model.added_tokens:
            raise ModelError(
                f"{link.version} has tokens of its own (model.added_tokens), and vLLM loads no adapter with rows of tokens",
                place="model.added_tokens",
                fix=fix,
            )
        links.insert(0, link)
        reference = _parent(link.model.path, tracking)
    return links


def _parent(path: str, tracking: TrackingConfig) -> str:
    """NAME/VERSION of the registered model that was downloaded to a folder; empty when the folder is none of that kind."""
    found = _DOWNLOADED.fullmatch(Path(path).name) if Path(path).is_absolute() else None
    if found is None:
        return ""
    reference = f"{found['name']}/{found['version']}"
    try:
        version = find_version(reference, tracking)
    except ModelError:
        return ""
    # Another store may have a version of this name and number.
    return reference if (version.run_id or "").startswith(found["run"]) else ""


def _fetched(link: Link, tracking: TrackingConfig, folder: Path) -> Path:
    return fetch_version(find_version(link.version, tracking), tracking, folder)
