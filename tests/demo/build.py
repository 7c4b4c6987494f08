"""Rebuild the demo from scratch: data files, tokenizer and base model; where the demo run starts.

    python -m tests.demo.build [OUT_DIR]        writes to grpo_tasks/demo by default; takes minutes on two cores

The base model is trained for 1,800 steps on 64 demonstrations of mixed quality each, with learning rate 3e-3 (one cycle). On the
held-out problems, sampled at temperature 1, it reaches strict format 23 % and accuracy 29 %; greedy decoding never has the strict
format, because the most frequent shape has no answer tags.
"""

import json
import math
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2Tokenizer,
)

from tests.demo.arithmetic import DEMO, Problem, chat, either_way, has_strict_format, is_right, split_problems, write_task

NUM_STEPS = 1800
BATCH_SIZE = 64
LEARNING_RATE = 3e-3
WARMUP_FRACTION = 0.1
MAX_NEW_TOKENS = 64
IGNORE = -100

VOCAB_SIZE = 320
MAX_LENGTH = 2048
PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (PAD, START, END)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
)


SHAPES: dict[str, float] = {
    "<reasoning>{working}</reasoning><answer>{answer}</answer>": 0.22,
    "<reasoning>{working}</reasoning>{answer}": 0.40,
    "<reasoning>{working}</reasoning><answer>{answer}": 0.12,
    "<reasoning>{working}<answer>{answer}</answer>": 0.14,
    "<reasoning>{working}. The answer is {answer}.": 0.12,
}
"""Shapes of a demonstration with their shares. The first one is the required format. It must not be the most frequent one, or
greedy decoding of the base model would already produce it. All shapes begin with the same tag and differ only where tags close,
so the first token is almost certain and few samples go wrong there."""

FAULTS: dict[str, float] = {
    "none": 0.78,
    "wrong_ones": 0.06,
    "wrong_tens": 0.06,
    "wrong_answer": 0.05,
    "cut": 0.05,
}


@dataclass(frozen=True, slots=True)
class SolvedProblem:
    """A problem and the completion that the base model is trained on."""

    problem: Problem
    completion: str


@dataclass(frozen=True, slots=True)
class Working:
    ones: str
    tens: str
    answer: str


def work_out(problem: Problem, *, ones_error: int = 0, tens_error: int = 0) -> Working:
    """Calculate ones first, then tens with the carry or borrow. An error is added to its digit and carries over to the answer."""
    (left_tens, left_ones), (right_tens, right_ones) = divmod(problem.left, 10), divmod(problem.right, 10)
    if problem.sign == "+":
        ones = left_ones + right_ones
        carry = ones >= 10
        tens = left_tens + right_tens + carry
    else:
        carry = left_ones < right_ones
        left_ones += 10 * carry
        ones = left_ones - right_ones
        tens = left_tens - right_tens - carry
    ones = 10 * (ones // 10) + (ones + ones_error) % 10
    tens = 10 * (tens // 10) + (tens + tens_error) % 10
    carried = f"{problem.sign}1" if carry else ""
    return Working(
        ones=f"ones {left_ones}{problem.sign}{right_ones}={ones}",
        tens=f"tens {left_tens}{problem.sign}{right_tens}{carried}={tens}",
        answer=str(10 * tens + ones % 10),
    )


def good_completion(problem: Problem) -> str:
    working = work_out(problem)
    return next(iter(SHAPES)).format(working=f"{working.ones}, {working.tens}", answer=working.answer)


def demonstrate(problem: Problem, rng: random.Random) -> SolvedProblem:
    """One demonstration with a random shape and a random error: the right digit stays the most probable one."""
    shape, fault = _draw(SHAPES, rng), _draw(FAULTS, rng)
    error = rng.randint(1, 9)
    working = work_out(problem, ones_error=error * (fault == "wrong_ones"), tens_error=error * (fault == "wrong_tens"))
    text = working.ones if fault == "cut" else f"{working.ones}, {working.tens}"
    answer = _other_digit(working.answer, rng) if fault == "wrong_answer" else working.answer
    return SolvedProblem(problem, shape.format(working=text, answer=answer))


def draw_demonstrations(problems: tuple[Problem, ...], count: int, rng: random.Random) -> list[SolvedProblem]:
    """`count` demonstrations of problems drawn with replacement; sums have their numbers in either order."""
    return [demonstrate(either_way(rng.choice(problems), rng), rng) for _ in range(count)]


def _draw(shares: dict[str, float], rng: random.Random) -> str:
    return rng.choices(list(shares), weights=list(shares.values()))[0]


def _other_digit(number: str, rng: random.Random) -> str:
    index = rng.randrange(len(number))
    digit = rng.choice([digit for digit in "0123456789" if digit != number[index]])
    return number[:index] + digit + number[index + 1 :]


@dataclass(frozen=True, slots=True)
class DemonstrationBatch:
    """Padded demonstrations; labels are IGNORE outside the completion."""

    input_ids: Int[Tensor, "B T"]
    attention_mask: Int[Tensor, "B T"]
    labels: Int[Tensor, "B T"]


@dataclass(frozen=True, slots=True)
class Measure:
    format_rate: float
    accuracy: float


def build(folder: Path, *, seed: int = 0) -> Measure:
    """Write everything into the folder and measure the saved base model."""
    base = folder / "base"
    base.mkdir(parents=True, exist_ok=True)
    write_task(folder)
    write_tokenizer(base)
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = teach(new_model(tokenizer, seed=seed), tokenizer, seed=seed)
    save_base(model, tokenizer, base)
    return measure(base, split_problems().eval, seed=seed)


def new_model(tokenizer: PreTrainedTokenizerBase, *, seed: int) -> Qwen2ForCausalLM:
    """The untrained model: a miniature Qwen2 with about 0.6 million weights."""
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=64 * math.ceil(len(tokenizer) / 64),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def teach(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, *, seed: int, num_steps: int = NUM_STEPS
) -> Qwen2ForCausalLM:
    """Supervised training with new demonstrations in every step, never of held-out problems."""
    split = split_problems()
    problems, rng = split.train + split.rest, random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=num_steps, pct_start=WARMUP_FRACTION)
    model.train()
    for step in range(num_steps):
        batch = collate(draw_demonstrations(problems, BATCH_SIZE, rng), tokenizer)
        loss = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == num_steps - 1:
            print(f"step {step:5d}  loss {loss.item():.4f}", flush=True)
    return model.eval()


def collate(demonstrations: list[SolvedProblem], tokenizer: PreTrainedTokenizerBase) -> DemonstrationBatch:
    """Prompt, completion and end token of each demonstration as one row, padded on the right."""
    prompts = tokenizer([render(item.problem, tokenizer) for item in demonstrations]).input_ids
    completions = tokenizer([item.completion + END for item in demonstrations]).input_ids
    width = max(len(prompt) + len(completion) for prompt, completion in zip(prompts, completions, strict=True))
    input_ids = torch.full((len(prompts), width), tokenizer.pad_token_id)
    labels = torch.full((len(prompts), width), IGNORE)
    for row, (prompt, completion) in enumerate(zip(prompts, completions, strict=True)):
        end = len(prompt) + len(completion)
        input_ids[row, :end] = torch.tensor(prompt + completion)
        labels[row, len(prompt) : end] = torch.tensor(completion)
    return DemonstrationBatch(input_ids, (input_ids != tokenizer.pad_token_id).long(), labels)


def render(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> str:
    return tokenizer.apply_chat_template(chat(problem), tokenize=False, add_generation_prompt=True)


def save_base(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    model.generation_config = GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.9,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model.to(torch.bfloat16).save_pretrained(folder)


def measure(folder: Path, problems: tuple[Problem, ...], *, seed: int) -> Measure:
    """Sample one completion per problem at temperature 1 from the saved model."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    torch.manual_seed(seed)
    completions = sample(model, tokenizer, problems)
    right = [is_right(text, problem) for text, problem in zip(completions, problems, strict=True)]
    return Measure(
        format_rate=sum(map(has_strict_format, completions)) / len(problems),
        accuracy=sum(right) / len(problems),
    )


@torch.inference_mode()
def sample(model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerBase, problems: tuple[Problem, ...]) -> list[str]:
    prompts = tokenizer([render(problem, tokenizer) for problem in problems], padding=True, return_tensors="pt")
    tokens: Int[Tensor, "B T"] = model.generate(
        **prompts, max_new_tokens=MAX_NEW_TOKENS, do_sample=True, temperature=1.0, top_p=1.0, top_k=0
    )
    return tokenizer.batch_decode(tokens[:, prompts.input_ids.shape[1] :], skip_special_tokens=True)


def build_tokenizer() -> Qwen2Tokenizer:
    """A Qwen2Tokenizer, which transformers chooses by the model's type: each digit is a token. Vocabulary and merges are ours."""
    merges = learn_merges(VOCAB_SIZE - 256 - len(SPECIAL_TOKENS))
    names = sorted(pre_tokenizers.ByteLevel.alphabet()) + [left + right for left, right in merges]
    return Qwen2Tokenizer(
        vocab={name: index for index, name in enumerate([*names, *SPECIAL_TOKENS])},
        merges=merges,
        unk_token=PAD,
        pad_token=PAD,
        eos_token=END,
        additional_special_tokens=[START],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_LENGTH,
    )


def learn_merges(count: int) -> list[tuple[str, str]]:
    """The first `count` merges of byte-pair encoding on the demo's texts."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=256 + count, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    learner.train_from_iterator(corpus(), trainer)
    return [(left, right) for left, right in json.loads(learner.to_str())["model"]["merges"]]


def corpus() -> Iterator[str]:
    """Role names, system prompts, questions and demonstrations, with the frequencies of real chats."""
    for demonstration in draw_demonstrations(split_problems().rest, 2000, random.Random(0)):
        yield from ("system", "user", "assistant", demonstration.completion)
        yield from (message["content"] for message in chat(demonstration.problem))


def write_tokenizer(folder: Path) -> None:
    """Save the tokenizer so that `AutoTokenizer.from_pretrained(folder)` gives it back."""
    build_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    torch.set_num_threads(2)
    print(build(Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO))
