"""The loss of a stage of kind sft against transformers' own cross entropy, and TRL's trainer."""

import warnings

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_tasks.data.demonstrations import encode_turns, read_demonstrations
from grpo_tasks.data.table import read_prompts
from schemas.config.stage import DemonstrationsConfig
from schemas.paths import resolve
from tests.grpo.conftest import SYSTEM, journal

PROMPT = [SYSTEM, {"role": "user", "content": "What is 15 + 27?"}]


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(resolve("embedded:base"), dtype=torch.float32).eval()


def reference_loss(model, demonstrations):
    """transformers' cross entropy over all trained tokens of these demonstrations, padded, with labels of -100 elsewhere."""
    rows = [one.prompt + one.token_ids for one in demonstrations]
    labels = [[-100] * len(one.prompt) + [t if m else -100 for t, m in zip(one.token_ids, one.trained, strict=True)]
              for one in demonstrations]  # fmt: skip
    width = max(map(len, rows))
    pad = lambda row, value: row + [value] * (width - len(row))  # noqa: E731
    ids, targets = torch.tensor([pad(row, 0) for row in rows]), torch.tensor([pad(row, -100) for row in labels])
    mask = torch.tensor([pad([1] * len(row), 0) for row in rows])
    with torch.no_grad():
        return float(model(input_ids=ids, attention_mask=mask, labels=targets).loss)


def two_turns(number, extra):
    said = extra["solution"]
    more = {"role": "user", "content": f"And {number} + 1?"}
    return {"solution": [{"role": "assistant", "content": said}, more, {"role": "assistant", "content": str(number + 1)}]}


@pytest.mark.slow
@pytest.mark.parametrize("turns", ["one", "several"])
def test_the_loss_is_that_of_transformers_on_the_masked_labels(sums, tokenizer, model, turns):
    if turns == "several":
        sums.rewrite(two_turns)
    # All thirty rows in one update, so that the order does not matter.
    _, directory = sums.train(max_steps=1, length=200, per_device_train_batch_size=30)
    rows = read_prompts(sums.root / "train.parquet")
    found = read_demonstrations(rows, DemonstrationsConfig(column="solution"), tokenizer, max_tokens=200)
    assert journal(directory)[0]["loss"] == pytest.approx(reference_loss(model, found.tokens), abs=1e-6)
    assert journal(directory)[0]["trained_tokens"] == sum(sum(one.trained) for one in found.tokens)


def test_the_token_accuracy_is_the_share_of_greedy_tokens(sums, tokenizer, model):
    _, directory = sums.train(max_steps=1, per_device_train_batch_size=30)
    rows = read_prompts(sums.root / "train.parquet")
    found = read_demonstrations(rows, DemonstrationsConfig(column="solution"), tokenizer, max_tokens=64).tokens
    right = total = 0
    for one in found:
        with torch.no_grad():
            logits = model(torch.tensor([one.prompt + one.token_ids])).logits[0, len(one.prompt) - 1 : -1]
        right += int((logits.argmax(-1) == torch.tensor(one.token_ids)).sum())
        total += len(one.token_ids)
    assert journal(directory)[0]["token_accuracy"] == pytest.approx(right / total, abs=1e-6)


@pytest.mark.slow
def test_accumulation_and_packing_by_tokens_change_nothing_but_rounding(sums):
    _, together = sums.train("together", max_steps=3)
    _, apart = sums.train("apart", max_steps=3, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    _, packed = sums.train("packed", max_steps=3, max_tokens_per_microbatch=200)
    for one, *others in zip(journal(together), journal(apart), journal(packed), strict=True):
        for other in others:
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-5)
            assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-3)


def test_only_the_assistants_turns_are_trained_each_with_its_end(tokenizer):
    turns = [
        {"role": "assistant", "content": "forty two"},
        {"role": "user", "content": "and 1 + 1?"},
        {"role": "assistant", "content": "two"},
    ]
    made = encode_turns(tokenizer, PROMPT, turns)
    said = tokenizer.decode([token for token, mine in zip(made.token_ids, made.trained, strict=True) if mine])
    others = tokenizer.decode([token for token, mine in zip(made.token_ids, made.trained, strict=True) if not mine])
    assert said.replace(" ", "") == f"fortytwo{tokenizer.eos_token}two{tokenizer.eos_token}"
    assert "and 1 + 1?" in others
    assert tokenizer.decode(made.prompt + made.token_ids) == tokenizer.apply_chat_template(
        [*PROMPT, *turns], tokenize=False
    ).removesuffix("\n")


def trl_first_loss(dataset, tokenizer, folder):
    """Loss of TRL's SFTTrainer on all rows, as one batch, before any update; and the token ids of the rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trl import SFTConfig, SFTTrainer

        settings = SFTConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=len(dataset),
            max_steps=1,
            completion_only_loss=True,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            report_to="none",
            logging_steps=1,
            save_strategy="no",
            learning_rate=1e-9,
            max_length=None,
            disable_tqdm=True,
        )
        model = AutoModelForCausalLM.from_pretrained(resolve("embedded:base"), dtype="float32")
        trainer = SFTTrainer(model=model, args=settings, train_dataset=dataset, processing_class=tokenizer)
        trained_on = list(trainer.train_dataset["input_ids"])
        # TRL trains on the line break behind the end of a turn too. A policy stops at the end of its turn: no label there.
        trainer.train_dataset = trainer.train_dataset.map(lambda row: {"labels": [*row["labels"][:-1], -100]})
        trainer.train()
    return next(line["loss"] for line in trainer.state.log_history if "loss" in line), trained_on


@pytest.mark.slow
def test_tokens_and_loss_are_those_of_trls_trainer(sums, tokenizer, tmp_path):
    pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")

    _, directory = sums.train(max_steps=1, per_device_train_batch_size=30)
    rows = read_prompts(sums.root / "train.parquet")
    table = [
        {
            "prompt": [dict(message) for message in row.messages],
            "completion": [{"role": "assistant", "content": row.extra["solution"]}],
        }
        for row in rows
    ]
    loss, ids = trl_first_loss(datasets.Dataset.from_list(table), tokenizer, tmp_path)
    found = read_demonstrations(rows, DemonstrationsConfig(column="solution"), tokenizer, max_tokens=64).tokens
    assert [one.prompt + one.token_ids for one in found] == [row[:-1] for row in ids]
    assert journal(directory)[0]["loss"] == pytest.approx(loss, abs=1e-5)
