"""What stop strings mean, said once for every engine, with a plain slow reference: decode after every token and search."""

import re

from grpo_tasks.content.tokenizer import prompt_ids
from grpo_tasks.rollout.engine import Request, completion_seed

SPECIAL, ORDINARY = "<search>", "<ask>"


def stop_requests(tokenizer, count):
    prompt = prompt_ids(tokenizer, [{"role": "user", "content": f"What is 27 + 57? {SPECIAL}{ORDINARY}"}])
    assert {tokenizer.convert_tokens_to_ids(token) for token in (SPECIAL, ORDINARY)} <= set(prompt)
    return [Request(prompt, completion_seed(4, 0) + index) for index in range(count)]


def around(tokenizer, completions, left, right):
    """The special token with some characters of its neighbours, as one of the completions has it."""
    number = tokenizer.convert_tokens_to_ids(SPECIAL)
    for completion in completions:
        for place, token in enumerate(completion.token_ids):
            before, after = (
                decoded(tokenizer, completion.token_ids[:place]),
                decoded(tokenizer, completion.token_ids[place + 1 :]),
            )
            before, after = before[max(0, len(before) - left) :], after[:right]
            if token == number and len(before + after) == left + right and "<" not in before + after:
                return before + SPECIAL + after
    raise AssertionError("no completion has the special token between ordinary ones")


def stop_settings(tokenizer, free):
    """Every kind of stop string there is."""
    number = tokenizer.convert_tokens_to_ids(SPECIAL)
    mixed = {"stop": ["</reasoning>", SPECIAL, "never seen"]}
    return [
        {},
        {"stop": [SPECIAL]},
        {"stop": [SPECIAL], "include_stop_str_in_output": False},
        {"stop": [ORDINARY]},
        {"stop": [ORDINARY], "include_stop_str_in_output": False},
        mixed,
        mixed | {"include_stop_str_in_output": False},
        # Over several tokens, some of them only in part.
        {"stop": [around(tokenizer, free, 2, 0)]},
        {"stop": [around(tokenizer, free, 0, 1)], "include_stop_str_in_output": False},
        {"stop": [around(tokenizer, free, 3, 1)]},
        # Special tokens that are no stop strings come before these.
        {"stop": ["</reasoning>"]},
        {"stop": ["reason"], "include_stop_str_in_output": False},
        {"stop": [str(tokenizer.eos_token)]},
        {"stop_token_ids": [number]},
        {"stop_token_ids": [number], "stop": ["</reasoning>"]},
    ]


def decoded(tokenizer, token_ids, *, special=True):
    return tokenizer.decode(token_ids, skip_special_tokens=not special, clean_up_tokenization_spaces=False)


def reference(tokenizer, completion, sampling):
    """(tokens, text, finish reason) of a completion that was sampled without stop strings, had they been there."""
    special = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    hidden = re.compile("|".join(map(re.escape, special)))
    with_special = any(hidden.search(stop) for stop in sampling.stop)
    for count in range(1, len(completion.token_ids) + 1):
        ids = completion.token_ids[:count]
        text = decoded(tokenizer, ids, special=with_special)
        found = [(text.find(stop), stop) for stop in sampling.stop if stop in text]
        if found:
            start, stop = min(found)
            return ids, hidden.sub("", text[:start]) + (stop if sampling.include_stop_str_in_output else ""), "stop"
        if ids[-1] in sampling.stop_token_ids:
            return ids, decoded(tokenizer, ids, special=False), "stop"
    return completion.token_ids, decoded(tokenizer, completion.token_ids, special=False), completion.finish_reason


def assert_stops(engine, tokenizer, requests, free, sampling):
    """Completions with stop strings are the free ones of the same seeds, cut where the reference cuts them."""
    drawn = engine.generate(requests, sampling)
    wanted = [reference(tokenizer, completion, sampling) for completion in free]
    assert [(one.token_ids, one.text, one.finish_reason) for one in drawn] == wanted
    if sampling.stop or sampling.stop_token_ids:
        assert sum(ids != one.token_ids or text != one.text for (ids, text, _), one in zip(wanted, free, strict=True)) > 0
