"""BOS, EOS and the end of a turn: whoever tokenises or stops agrees with all the others, and with transformers."""

import copy

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_tasks.content.tokenizer import end_token_ids, prompt_ids, surroundings, text_ids, turn_end
from grpo_tasks.data.chat_tokens import TokenCounter
from grpo_tasks.data.demonstrations import encode_turns
from grpo_tasks.grpo.trl import _SuiteTrainer
from grpo_tasks.policy.load import load_policy, load_tokenizer
from grpo_tasks.policy.merge import merge
from grpo_tasks.rollout.chat_session import ChatSession
from grpo_tasks.rollout.engine import Request, Sampling
from grpo_tasks.rollout.local import LocalEngine
from grpo_tasks.tracking.chat_model import ServedModel
from schemas.config.model import ModelConfig
from schemas.config.rollout import RolloutConfig
from schemas.prompts import PLAIN
from schemas.results.model import MergeSpec, ModelRef
from tests.variants import BASE, BOS, END, NO_END, START, TEMPLATE, variant

CHAT = [{"role": "user", "content": "What is 15 + 27?"}]
MARKS = st.lists(st.sampled_from([BOS, START]), max_size=2, unique=True)
TEXTS = st.tuples(MARKS.map("".join), st.text("a 7é\n", max_size=6)).map("".join)


def adding(tokenizer, before, behind):
    """The tokenizer with a post-processor that adds these special tokens to any text."""
    made = copy.deepcopy(tokenizer)
    ids = [(token, made.convert_tokens_to_ids(token)) for token in (BOS, START, END)]
    made.backend_tokenizer.post_processor = TemplateProcessing(single=[*before, "$A", *behind], special_tokens=ids)
    return made


@given(before=MARKS, behind=st.lists(st.sampled_from([END, BOS]), max_size=1), text=TEXTS)
@example(before=[BOS], behind=[END], text=f"{BOS}{START}user\nhi")
@settings(max_examples=60)
def test_whoever_tokenises_a_plain_prompt_gets_one_beginning_and_no_end(tokenizer, before, behind, text):
    made, transformers_way = adding(tokenizer, before, behind), adding(tokenizer, before, [])
    [ids] = text_ids(made, [text])
    first = tokenizer.convert_tokens_to_ids(before)
    assert surroundings(made) == (first, tokenizer.convert_tokens_to_ids(behind))
    if text.startswith("".join(before)) or (before and text.startswith(before[0])):
        assert ids == tokenizer(text)["input_ids"]
    elif not any(text.startswith(token) for token in before):
        assert ids == transformers_way(text)["input_ids"]
    prompt = [{"role": PLAIN, "content": text}]
    assert prompt_ids(made, prompt) == encode_turns(made, prompt, [{"role": "assistant", "content": "a"}]).prompt == ids
    counter = TokenCounter(made)
    assert counter.count([prompt]) == [len(ids)]
    assert served_by(made)._prompt_ids({"prompt": text}) == ids
    trl = _SuiteTrainer.__new__(_SuiteTrainer)
    trl.processing_class = made
    assert trl._tokenize_prompts([text])[0] == [ids]


def served_by(tokenizer):
    model = ServedModel()
    model._tokenizer = tokenizer
    return model


def test_a_prompt_that_a_template_rendered_is_the_chat_again(tokenizer):
    made = adding(tokenizer, [BOS], [END])
    made.chat_template = BOS + TEMPLATE
    text = made.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=False)
    wanted = made.apply_chat_template(CHAT, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert text_ids(made, [text]) == [wanted]
    assert prompt_ids(made, CHAT) == wanted


@pytest.mark.parametrize(
    ("template", "eos", "end", "ids"),
    [
        (TEMPLATE, END, END, {318}),
        (TEMPLATE, BOS, END, {316, 318}),
        (TEMPLATE, None, END, {318}),
        (NO_END, END, None, {318}),
        (TEMPLATE + BOS, BOS, BOS, {316}),
        ("{{ raise_exception('no') }}", BOS, None, {316}),
        ("{% for message in messages %}{{ message.role }}{% endfor %}", BOS, None, {316}),
        (None, BOS, None, {316}),
    ],
)
def test_the_template_names_the_end_of_a_turn(tokenizer, template, eos, end, ids):
    made = copy.deepcopy(tokenizer)
    made.eos_token, made.chat_template = eos, template
    # The role of EOS gone, the marker is still a special token.
    made.add_special_tokens({"extra_special_tokens": [START, END]}, replace_extra_special_tokens=False)
    assert turn_end(made) == end
    assert end_token_ids(made, None) == ids
    assert end_token_ids(made, [9, 316]) == ids | {9, 316}


@pytest.fixture(scope="module")
def unnamed(tmp_path_factory):
    """The embedded model, whose tokenizer and generation config call another token EOS."""
    return variant(tmp_path_factory.mktemp("models") / "eot", eos=BOS)


@pytest.fixture(scope="module")
def greedy():
    """transformers' own greedy answer of the embedded model, which knows its end token."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(BASE, dtype=torch.float32), AutoTokenizer.from_pretrained(BASE)
    return answer_of(model, tokenizer)


def answer_of(model, tokenizer):
    prompt = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, do_sample=False, max_new_tokens=60, temperature=None, top_p=None)
    return out[0, prompt["input_ids"].shape[1] :].tolist()


def test_an_unnamed_end_of_turn_ends_sampling_and_chat(unnamed, greedy):
    assert greedy[-1] == 318
    ref = ModelRef(path=str(unnamed))
    tokenizer, policy = load_tokenizer(ref), load_policy(ref, ModelConfig(), device=torch.device("cpu"))
    sampling = Sampling.of(RolloutConfig(max_completion_length=60), temperature=0.0)
    [completion] = LocalEngine(policy, tokenizer).generate([Request(prompt_ids(tokenizer, CHAT), 0)], sampling)
    assert (completion.token_ids, completion.finish_reason) == (greedy, "stop")
    said = "".join(ChatSession(unnamed).answer(CHAT, max_new_tokens=60, greedy=True))
    assert said == completion.text == tokenizer.decode(greedy, skip_special_tokens=True)


@pytest.mark.parametrize("stop", [["</reas"], ["</reasoning>", "</"], ["=4", "2<"], ["never"]])
@pytest.mark.parametrize("include", [True, False])
def test_a_chat_ends_at_the_stop_strings_of_the_training(stop, include):
    ref = ModelRef(path="embedded:base")
    tokenizer, policy = load_tokenizer(ref), load_policy(ref, ModelConfig(), device=torch.device("cpu"), dtype="float32")
    rollout = RolloutConfig(max_completion_length=60, stop=stop, include_stop_str_in_output=include)
    sampling = Sampling.of(rollout, temperature=0.0)
    [completion] = LocalEngine(policy, tokenizer).generate([Request(prompt_ids(tokenizer, CHAT), 0)], sampling)
    pieces = list(ChatSession(BASE, stop=stop, include_stop=include).answer(CHAT, max_new_tokens=60, greedy=True))
    assert "".join(pieces) == completion.text
    assert len(pieces) > 2


def test_a_chat_that_fails_says_so_instead_of_waiting(unnamed, monkeypatch):
    session = ChatSession(unnamed)
    monkeypatch.setattr(session._model, "generate", lambda **_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        list(session.answer(CHAT, max_new_tokens=4))


def test_an_unnamed_end_of_turn_is_named_in_the_merged_model(unnamed, greedy, tmp_path):
    spec = MergeSpec(
        ref=ModelRef(path=str(unnamed)), model=ModelConfig(merged_dtype="float32"), prompts=[CHAT], max_new_tokens=60,
        chat_template_kwargs={}, system_prompt=None,
    )  # fmt: skip
    proof = merge(spec, tmp_path, device=torch.device("cpu"))
    assert proof.answers[0].text == AutoTokenizer.from_pretrained(BASE).decode(greedy, skip_special_tokens=True)
    folder = tmp_path / "model"
    published = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert answer_of(published, AutoTokenizer.from_pretrained(folder)) == greedy
