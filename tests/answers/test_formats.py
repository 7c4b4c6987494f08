"""The formats besides tags: what is the answer, what keeps the format, and what no text can do to the readers."""

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from grpo_tasks.answers.equality import answers_equal
from grpo_tasks.answers.extract import check_completion, extract, perfect_completion
from grpo_tasks.answers.extraction import is_blank
from schemas.config.completion import CompletionConfig
from schemas.errors import ConfigError

SCHEMA = {
    "type": "object",
    "properties": {
        "label": {"enum": ["positive", "negative"]},
        "score": {"type": "number", "minimum": 1, "maximum": 5},
        "words": {"type": "array", "items": {"type": "string", "pattern": "^[a-z]+$"}, "uniqueItems": True},
    },
    "required": ["label", "score"],
    "additionalProperties": False,
}
ANSWER_ONLY = CompletionConfig(tags={"reasoning": None, "answer": "final"})
JSON = CompletionConfig(format="json", answer_key="answer", required=["why"])
FITTING = CompletionConfig(format="json", answer_key="label", json_schema=SCHEMA, equality="exact")
BOXED = CompletionConfig(format="boxed", equality="math")
REGEX = CompletionConfig(format="regex", pattern=r"(?m)^#### (.+)$")
FREE = CompletionConfig(format="none")
FORMATS = {"answer only": ANSWER_ONLY, "json": JSON, "schema": FITTING, "boxed": BOXED, "regex": REGEX, "none": FREE}


def seconds(text, completion):
    """Computing time of reading a text."""
    began = time.process_time()
    extract(text, completion)
    return time.process_time() - began


def read(text, completion):
    found = extract(text, completion)
    return found.answer, found.strict_format, found.lenient_answer


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("So it is <final>42</final>", ("42", True, "42")),
        ("<final>42</final> I hope", ("42", False, "42")),
        ("<final>41</final><final>42</final>", (None, False, "42")),
        ("<final>42", (None, False, "42")),
        ("It is 42", (None, False, "42")),
        ("w<final> </final>", (None, False, None)),
    ],
)
def test_without_a_reasoning_tag_any_text_may_stand_before_the_answer(text, expected):
    assert read(text, ANSWER_ONLY) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"why": "sum", "answer": " 42 "}', ("42", True, "42")),
        ('First, 15 + 27.\n```json\n{"why": "sum", "answer": 42}\n```', ("42", True, "42")),
        ('```\n{"why": "sum", "answer": true}\n```\n', ("true", True, "true")),
        ('{"why": "sum", "answer": [4, "2"]}', ('[4,"2"]', True, '[4,"2"]')),
        ('{"answer": 42}', ("42", False, "42")),
        ('{"why": "sum"}', (None, False, None)),
        ('{"why": "sum", "answer": null}', (None, False, None)),
        ("42", (None, False, None)),
        ('{"why": "sum", "answer": "\u200b"}', (None, False, None)),
        ('{"answer": 41, "answer": 42, "why": ""}', (None, False, None)),
        ('So: {"why": "sum", "answer": 42}', (None, False, "42")),
        ('```json\n{"why": "", "answer": 42}\n``` right?', (None, False, "42")),
        ('```\n{"why": "", "answer": 41}\n```\n```\n{"why": "", "answer": 42}\n```', (None, False, "42")),
        ('{"why": "sum", "answer": 42', (None, False, None)),
        ('{"why": "sum", "answer": NaN}', (None, False, None)),
        ('{"why": "sum", "answer": 1e999}', (None, False, None)),
        ('[{"why": "sum", "answer": 42}]', (None, False, "42")),
        ("{}", (None, False, None)),
        ("", (None, False, None)),
    ],
)
def test_a_json_answer_is_the_value_of_its_key_in_one_object(text, expected):
    assert read(text, JSON) == expected


@pytest.mark.parametrize(
    ("text", "keeps"),
    [
        ('{"label": "positive", "score": 4, "words": ["good", "great"]}', True),
        ('{"label": "positive", "score": 9}', False),
        ('{"label": "positive"}', False),
        ('{"label": "positive", "score": 4, "more": 1}', False),
        ('{"label": "positive", "score": 4, "words": ["A"]}', False),
        ('{"label": "positive", "score": 4, "words": ["a", "a"]}', False),
    ],
)
def test_the_format_of_json_is_its_schema(text, keeps):
    check_completion(FITTING)
    assert extract(text, FITTING).strict_format is keeps


@pytest.mark.parametrize(
    ("text", "keeps"),
    [('{"a1": 1}', True), ('{"a1": "x"}', False), ('{"c": {"c": {}}}', True), ('{"c":' * 900 + "{}" + "}" * 900, False)],
)
def test_a_schema_may_use_key_patterns_and_refer_to_itself(text, keeps):
    schema = {"patternProperties": {"^a[0-9]$": {"type": "number"}}, "properties": {"c": {"$ref": "#"}}}
    named = CompletionConfig(format="json", json_schema=schema)
    check_completion(named)
    assert extract(text, named).strict_format is keeps


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (r"So \boxed{42}.", ("42", True, "42")),
        (r"$$\boxed{\frac{1}{2}}$$", (r"\frac{1}{2}", True, r"\frac{1}{2}")),
        (r"\boxed{41}, no: \boxed{42}", ("42", True, "42")),
        (r"\boxed{\{1, 2\}}", (r"\{1, 2\}", True, r"\{1, 2\}")),
        (r"\boxed{\left\{ x}", (r"\left\{ x", True, r"\left\{ x")),
        (r"\boxed{41} and \boxed{42", (None, False, None)),
        (r"\boxed{}", (None, False, None)),
        ("It is 42", (None, False, "42")),
        ("", (None, False, None)),
    ],
)
def test_a_boxed_answer_is_the_last_balanced_box(text, expected):
    assert read(text, BOXED) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("15 + 27\n#### 42", ("42", True, "42")),
        ("#### 41\n#### 42\nDone.", ("42", True, "42")),
        ("It is 42", (None, False, "42")),
        ("####  ", (None, False, None)),
        ("\ue00043\ue001\n#### 42", ("42", True, "42")),
        ("", (None, False, None)),
    ],
)
def test_an_answer_by_pattern_is_the_group_of_its_last_match(text, expected):
    assert read(text, REGEX) == expected


def test_free_text_has_no_answer_and_keeps_its_format():
    assert read("A fine day.", FREE) == (None, True, None)
    assert read(" \u200b", FREE) == (None, False, None)


def test_text_before_an_answer_is_reasoning_without_a_tag():
    texts = {
        "answer only": "work<final>42</final>",
        "boxed": r"work\boxed{42}",
        "regex": "work\n#### 42",
        "json": 'work```{"why": "", "answer": 1}```',
    }
    assert {name: extract(text, FORMATS[name]).reasoning.strip() for name, text in texts.items()} == dict.fromkeys(texts, "work")


answers = st.one_of(
    st.integers(-(10**6), 10**6).map(str),
    st.text(st.characters(exclude_characters="<>{}\\\ue000\ue001", exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=40),
)


@pytest.mark.parametrize("completion", [CompletionConfig(), ANSWER_ONLY, JSON, BOXED, REGEX], ids=lambda found: found.format)
@given(answer=answers.filter(lambda text: not is_blank(text)))
@settings(max_examples=40)
def test_the_perfect_completion_gives_its_answer_back(completion, answer):
    text = perfect_completion(answer, completion, reasoning="15 + 27 is the sum")
    assert text is not None
    assert read(text, completion)[:2] == (answer.strip(), True)


@pytest.mark.parametrize(
    ("pattern", "answer"),
    [
        ("#### (.+)", "42"),
        (r"(?i)the (?:final )?answer is:?\s*([-\d.,]+)\.?$", "42"),
        (r"\\boxed\{(\d+)\}", "42"),
        (r"(?s)^<think>.+</think>\s*(?P<answer>\S.*)$", "yes"),
        (r"Answer\s*[:=]\s*\(([A-E])\)", "B"),
        (r"(?:A|B){2,3}[0-9]+\[(\w+)\](?:x|y)?", "word"),
        (r"[^x]{2}[\d]+?[\-]: (.+)", "42"),
    ],
)
def test_most_patterns_have_a_perfect_completion(pattern, answer):
    completion = CompletionConfig(format="regex", pattern=pattern)
    text = perfect_completion(answer, completion)
    assert text is not None
    assert extract(text, completion).answer == answer


def test_a_schema_has_a_perfect_completion_if_it_can_be_filled():
    assert json.loads(perfect_completion("negative", FITTING) or "") == {"label": "negative", "score": 1}
    assert perfect_completion("neutral", FITTING) is None
    objects = CompletionConfig(
        format="json", required=["title"], json_schema={"$ref": "#/$defs/a", "$defs": {"a": {"required": ["n"]}}}
    )
    assert json.loads(perfect_completion(None, objects) or "").keys() == {"title", "n"}


def test_no_perfect_completion_is_better_than_a_wrong_one():
    assert perfect_completion("42", FREE) is None
    assert perfect_completion("x", CompletionConfig(format="regex", pattern=r"#### (\d+)")) is None
    assert perfect_completion("x", CompletionConfig(format="regex", pattern="z{,3}(.)")) is None
    assert perfect_completion("a } b", BOXED) is None
    assert perfect_completion(None, CompletionConfig()) is None


soup = st.lists(
    st.one_of(
        st.sampled_from([*'{}[]"\\\n\ue000\ud800', '{"answer": 1', "```", "json", "\\boxed{", "#### ", "<final>"]),
        st.text(max_size=20),
    ),
    max_size=20,
).map("".join)


@pytest.mark.parametrize("name", FORMATS)
@given(text=soup)
@settings(max_examples=50)
def test_no_soup_of_marks_breaks_a_reader(name, text):
    found = extract(text, FORMATS[name])
    assert found.answer is None or not is_blank(found.answer)
    assert found.lenient_answer is None or not is_blank(found.lenient_answer)
    assert not (found.strict_format and found.worthless)
    assert 0 <= found.trailing_chars <= len(text)


HOSTILE = {
    "answer only": ["<final>", "<"],
    "json": ['{"a":', '"', "```"],
    "schema": ['{"label":1},'],
    "boxed": ["\\boxed{", "\\{", " "],
    "regex": ["#### ", "####\n", "\ue000"],
    "none": [" ", "a"],
}


@pytest.mark.parametrize(("name", "piece"), [(name, piece) for name, pieces in HOSTILE.items() for piece in pieces])
def test_the_time_of_a_million_hostile_characters_grows_with_their_number(name, piece):
    def quickest(length):
        text = (piece * length)[:length]
        return min(seconds(text, FORMATS[name]) for _ in range(5))

    # A reader that goes back takes four times as long for twice the characters. Below 5 ms the rest of the machine counts.
    assert quickest(1_000_000) < 3 * max(quickest(500_000), 0.005)


@pytest.mark.parametrize(
    "text",
    [
        '{"label": "positive", "score": 4, "words": [' + "{}," * 30_000 + "{}]}",
        '{"label": "positive", "score": ' + "9" * 90_000 + "}",
        '{"label": "positive", "words": ' + "[" * 40_000 + "]" * 40_000 + "}",
        "{" + ",".join(f'"k{i}": 1' for i in range(8_000)) + "}",
    ],
)
def test_no_object_makes_a_schema_slow(text):
    assert not extract(text, FITTING).strict_format
    assert seconds(text, FITTING) < 1.0


@pytest.mark.parametrize("pattern", ["(x+x+)+y", "(.*[^A-Z]|[A-Z])", "(A|AA)+$", "(.{1,500}){1,2}b"])
def test_no_text_makes_a_pattern_hang(pattern):
    assert seconds("A" * 1_000_000, CompletionConfig(format="regex", pattern=pattern)) < 5.0


@pytest.mark.parametrize(
    ("given", "place", "fix"),
    [
        ({"format": "regex", "pattern": "(?=4)(2)"}, "completion.pattern", "no look-around"),
        ({"format": "regex", "pattern": "#### .+"}, "no group", "#### (.+)"),
        ({"format": "json", "json_schema": {"type": "array"}}, "array", "type: object"),
        ({"format": "json", "json_schema": {"type": "objekt"}}, "json_schema.type", "json-schema.org"),
        ({"format": "json", "json_schema": {"$ref": "https://example.org/x.json"}}, "outside", "$defs"),
        ({"format": "json", "json_schema": {"properties": {"a": {"$ref": "#/$defs/none"}}}}, "#/$defs/none", "$defs"),
        ({"format": "json", "json_schema": {"properties": {"a": {"pattern": "(?=4)"}}}}, "(?=4)", "RE2"),
    ],
)
def test_an_unusable_pattern_or_schema_is_refused_with_its_place(given, place, fix):
    with pytest.raises(ConfigError) as refused:
        check_completion(CompletionConfig(**given))
    assert place in str(refused.value)
    assert fix in str(refused.value)


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ({"format": "regex"}, "pattern: '#### "),
        ({"pattern": "(.+)"}, "format: regex"),
        ({"answer_key": "label"}, "format: json"),
    ],
)
def test_fields_of_another_format_are_refused_with_the_fix(given, fix):
    with pytest.raises(ValidationError) as refused:
        CompletionConfig(**given)
    assert fix in str(refused.value)


@pytest.mark.parametrize(
    ("function", "given", "fix"),
    [
        ("incremental_format", {"format": "json"}, "fix: format"),
        ("correctness", {"format": "none"}, "completion.format"),
        ("correctness", {"format": "json"}, "completion.answer_key"),
        ("format", {"format": "none"}, "of your own"),
        ("style", {"format": "json"}, "length"),
    ],
)
def test_a_reward_that_makes_no_sense_for_a_format_is_refused(function, given, fix):
    from schemas.config.run import RunConfig

    tree = {"data": {"train": [{"path": "a.jsonl"}]}, "stages": [{"name": "one", "rewards": [function]}]}
    RunConfig(**tree)
    with pytest.raises(ValidationError) as refused:
        RunConfig(**tree, completion=given)
    assert fix in str(refused.value)
    assert "stages.0.rewards" in str(refused.value)


def test_a_whole_object_is_the_answer_where_no_key_is_named():
    whole = CompletionConfig(format="json", equality="json", required=["total"])
    truth = '{"total":10.5,"currency":"EUR"}'
    found = extract('Here it is:\n```json\n{"currency": "EUR", "total": 10.50}\n```', whole)
    assert answers_equal(found.answer, truth, "json")
    assert perfect_completion(truth, whole) == truth
    # Functions of a user's own need no answer, and yet a perfect completion.
    assert perfect_completion(truth, CompletionConfig(format="json", required=["total"])) == truth
    assert perfect_completion(truth, CompletionConfig(format="json", required=["number"])) is None
    assert perfect_completion("42", CompletionConfig(format="json")) is None
