"""One fault planted in a model, its tokenizer, its template, our code or a server; then `grpo run`.

The run must name the fault before the first update, and either do the right thing in spite of it or refuse. It is then ended.
"""

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, Gemma3TextConfig, GraniteConfig, PretrainedConfig, StableLmConfig

from tests.flows.place import SMALL, Place
from tests.rollout.servers import SMALL as SMALL_SERVER
from tests.variants import BASE, BOS, END, NO_END, START, variant

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("planted"), pytest.mark.timeout(1800)]

STRINGS = "rendered.jsonl"
"""Prompts that a chat template has rendered, as many data sets hold them."""
PLANTING = Path(__file__).parent / "planting"
SHAPE = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.15, "bos_token_id": None, "eos_token_id": 318, "pad_token_id": 316,
}  # fmt: skip


def made_up(folder: Path, config: PretrainedConfig) -> None:
    """A model of random weights with the tokenizer of the embedded one."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(BASE / name, folder)


def scaled(folder: Path) -> None:
    """Its logits are divided by 8."""
    made_up(folder, GraniteConfig(**SHAPE, logits_scaling=8.0))


def capped(folder: Path) -> None:
    """Its logits are capped at 3."""
    made_up(folder, Gemma3TextConfig(**SHAPE, head_dim=16, final_logit_softcapping=3.0))


def deaf(folder: Path) -> None:
    """Its layers drop the keyword argument that names the prompt."""
    made_up(folder, StableLmConfig(**SHAPE))


@dataclass(frozen=True)
class Fault:
    """A fault of the base model of a run."""

    name: str
    plant: Callable[[Path], Any]
    """Makes the model with the fault in a new folder."""
    says: str
    """Part of the sentence that names it."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """Other sections of the config."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """What plants it in the processes of the run and in its servers."""


RENDERED = {"data": {"train": [{"path": STRINGS}], "eval_fraction": 0.2}}
MADE_UP = {
    "evaluation": SMALL["evaluation"] | {"max_truncated": 1.0},
    "stages": [SMALL["stages"][0] | {"skip_dead_groups": False}],
}
"""Random weights end no completion, and earn nothing."""
SERVER = {"rollout": SMALL["rollout"] | {"engine": "vllm", "vllm": {"python": sys.executable, "sync": "adapter"}}}
BARE_HEAD = {"PYTHONPATH": str(PLANTING), "PLANTED": "bare head"}
NO_ADAPTER = {"PYTHONPATH": str(PLANTING), "PLANTED": "no adapter"}
IGNORING = {"PYTHONPATH": str(SMALL_SERVER), "TEST_INSTEAD": "nothing"}
FAULTS = (
    Fault("wrong BOS: written twice", lambda folder: variant(folder, before=(BOS,)), "they have it once", RENDERED),
    Fault("wrong BOS: left out by the template", lambda folder: variant(folder, before=(BOS,)), "the chat template does not"),
    Fault("wrong end token: EOS behind the prompt", lambda folder: variant(folder, behind=(END,)), "prompts have none", RENDERED),
    Fault(
        "wrong end token: named nowhere but in the template", lambda folder: variant(folder, eos=BOS), "it ends completions here"
    ),
    Fault("wrong end token: in the template too", lambda folder: variant(folder, eos=BOS, template=NO_END), "cut off 100.0%"),
    Fault("logit scale left out", scaled, "log-probabilities of GraniteForCausalLM: off by", MADE_UP, BARE_HEAD),
    Fault("soft cap left out", capped, "log-probabilities of Gemma3ForCausalLM: off by", MADE_UP, BARE_HEAD),
    Fault("dropped keyword: the prompt is not seen", deaf, "one of its layers does not pass the prompt on", MADE_UP),
    Fault("adapter that does nothing, local engine", variant, "cannot sample from Qwen2ForCausalLM: off by", {}, NO_ADAPTER),
    Fault("adapter that does nothing, server", variant, "does not take over the policy: it shows no shift", SERVER, IGNORING),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory, prefect_api):
    return Place(tmp_path_factory.mktemp("planted"), prefect_api)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_named_before_the_first_update(place, fault):
    name = f"planted-{FAULTS.index(fault)}"
    fault.plant(place.root / name)
    rows = [
        {"prompt": f"{BOS}{START}user\nWhat is {one} + 27?{END}\n{START}assistant\n", "answer": one + 27} for one in range(11, 61)
    ]
    place.write(STRINGS, "".join(json.dumps(row) + "\n" for row in rows))
    place.write(f"{name}.yaml", yaml.safe_dump(SMALL | {"name": name, "model": {"path": name}} | fault.changes))
    process = place.start("run", f"{name}.yaml", COLUMNS="1000", **fault.environment)
    assert any(fault.says in line for line in process.stdout)
    journals = place.root.glob(f"runs/{name}/train_stage/*/metrics.jsonl")
    updates = [line for journal in journals for line in journal.read_text().splitlines()]
    process.terminate()
    # The rest of its output, so that it does not wait for a reader.
    process.stdout.read()
    process.wait(timeout=120)
    assert updates == []
