"""`grpo plan --nodes`: what it prints, what it refuses, and that nothing changes without it."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flows.cli.main import app
from schemas.paths import resolve

VLLM = ("--set", "rollout.engine=vllm")


def grpo(*words):
    found = CliRunner().invoke(app, ["plan", "demo", *map(str, words)])
    return found.exit_code, " ".join((found.stdout + found.stderr).replace("│", " ").split())


def test_a_cluster_is_planned_in_one_command():
    code, text = grpo(*VLLM, "--nodes", 2, "--cards-per-node", 4, "--replicas", 3, "--card", "a100")
    assert code == 0
    assert "Stage format, one update on 8 x a100: 5 train, 3 replicas of 1 (calculated)" in text
    assert "weights to the replicas" in text
    assert "Bottleneck: " in text
    assert "The fastest layout for each number of cards" in text
    assert " 512 " in text
    assert "It fits into 74.5 GiB" in text  # the 80 GB of the card


def test_without_nodes_only_memory_is_planned():
    code, text = grpo()
    assert code == 0
    assert "It fits into 22.4 GiB" in text
    assert "update on" not in text
    assert "Bottleneck" not in text


@pytest.mark.parametrize(
    ("words", "message", "fix"),
    [
        (("--nodes", 1, "--card", "v100"), "no card is called 'v100'", "one of a100, h100, h200, b200, l40s, rtx4090"),
        (("--nodes", 1, "--network", "carrier pigeon"), "no network is called", "one of 10gbit, 100gbit"),
        (("--replicas", 2), "for a number of nodes", "--nodes 1"),
        ((*VLLM, "--nodes", 1, "--replicas", 8), "8 replicas x 1 cards leave none of the 8 cards for training", "--replicas 7"),
        ((*VLLM, "--nodes", 9, "--replicas", 1), "71 processes cannot share the 64 completions", "raise gradient_accumulation"),
        (
            ("--nodes", 1, "--replicas", 1),
            "engine local samples on the cards that train",
            "leave it out, or --set rollout.engine=vllm",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(words, message, fix):
    code, text = grpo(*words)
    assert code == 2
    assert message in text
    assert f"fix: {fix}" in text


def test_a_model_that_the_calculation_does_not_know_is_refused(tmp_path):
    config = json.loads(Path(resolve("embedded:base"), "config.json").read_text()) | {"num_experts": 8}
    (tmp_path / "config.json").write_text(json.dumps(config))
    code, text = grpo("--set", f"model.path={tmp_path}", "--nodes", 1)
    assert code != 0
    assert "several experts for each layer" in text
    assert "fix: leave --nodes out" in text
