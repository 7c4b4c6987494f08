"""What a config file or a `--set` value may be, and what is said of the others."""

import itertools
import os

import pytest

from schemas.config import load
from schemas.config.load import MAX_CHARS, _Loader, check_config, load_config, parse_yaml
from schemas.errors import MAX_LINES, ConfigError, DataError, UserError

MINIMAL = "data: {train: [{path: rows.jsonl}]}\nstages: [{name: only, rewards: [format]}]\n"
LETTERS = "abcdefgh"
NINE = "[{}, {}, {}, {}, {}, {}, {}, {}, {}]"
LISTS = "a0: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{b}0: &{b} {NINE.replace('{}', '*' + a)}\n" for a, b in itertools.pairwise(LETTERS)
)
MERGES = "a0: &a {x: 1}\n" + "".join(
    f"{b}0: &{b} {{<<: {NINE.replace('{}', '*' + a)}}}\n" for a, b in itertools.pairwise(LETTERS)
)
LONG_TEXTS = f"a: &a {'x' * 500_000}\nb: {NINE.replace('{}', '*a')}\n"

REFUSED = {
    "top key twice": ("seed: 1\nname: a\nseed: 2\n", "duplicate key seed, first in line 1", ":3"),
    "nested key twice": ("model:\n  lora:\n    r: 8\n    r: 16\n", "duplicate key r, first in line 3", ":4"),
    "key twice in a list": ("stages:\n- {name: a, name: b}\n", "duplicate key name", ":2"),
    "nested too deep": (f"a: {'[' * 200}{']' * 200}", "more than 50 levels deep", ""),
    "aliases that multiply": (LISTS, "after its aliases are expanded", ":"),
    "merge keys that multiply": (MERGES, "after its aliases are expanded", ":"),
    "a long text many times": (LONG_TEXTS, "after its aliases are expanded", ":"),
    "a value inside itself": ("a: &a [1, *a]", "contains itself", ":1"),
    "a tab": ("model:\n\tpath: x\n", "indent with spaces", ":2"),
    "no closing bracket": ("a: [1, 2\nb: 3\n", "correct that line", ":2"),
    "an unknown alias": ("a: *nowhere", "undefined alias", ":1"),
    "python code": ("!!python/object/apply:os.system ['true']", "could not determine a constructor", ":1"),
    "two documents": ("a: 1\n---\nb: 2\n", "single document", ":2"),
    "a date that is none": ("a: 2024-99-99", "month must be", ""),
    "an empty number": ("a: !!int ''", "YAML cannot read a value", ""),
    "a number of 5,000 digits": (f"a: {'9' * 5_000}", "YAML cannot read a value", ""),
    "a NUL": ("a: \x00", "not readable as YAML", ""),
    "two million characters": ("a: " + "x" * 2 * MAX_CHARS, "at most 1,048,576", ""),
}


@pytest.mark.parametrize("name", REFUSED)
def test_broken_doubled_or_explosive_yaml_is_refused_with_its_line(name):
    text, says, line = REFUSED[name]
    for place, refused in (("file.yaml", lambda: parse_yaml(text, place="file.yaml")), ("--set", lambda: _override(text))):
        with pytest.raises(ConfigError) as caught:
            refused()
        assert says in str(caught.value)
        assert line in caught.value.place.removeprefix(place)
        assert caught.value.fix
        assert len(str(caught.value)) < 3_000


def _override(text):
    load_config("demo", [f"rollout.stop={text}"])


def test_the_rules_hold_in_a_file_that_is_extended(tmp_path):
    (tmp_path / "below.yaml").write_text(MINIMAL + "seed: 1\nseed: 2\n")
    (tmp_path / "top.yaml").write_text("extends: below.yaml\n")
    with pytest.raises(ConfigError, match="duplicate key seed") as caught:
        load_config(tmp_path / "top.yaml")
    assert caught.value.place == f"{tmp_path / 'below.yaml'}:4"


def test_merge_keys_and_aliases_still_work_and_a_written_key_wins():
    text = "base: &base {a: 1, b: 2}\nmore: &more {c: 3}\nmade: {<<: [*base, *more], b: 5}\nagain: *base\n"
    read = parse_yaml(text, place="")
    assert read["made"] == {"a": 1, "b": 5, "c": 3}
    assert read["again"] == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda path: path.mkdir(), "it is a folder"),
        (os.mkfifo, "named pipe"),
        (lambda path: path.symlink_to(path), "cannot be followed"),
        (lambda path: path.symlink_to("nowhere"), "a link to a file that does not exist"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device"),
        (lambda path: path.write_bytes(b"x" * 20 * 2**20), "20,971,520 bytes"),
        (lambda path: path.write_bytes(b"name: a\nseed: \xff\n"), "byte 0xff is not UTF-8"),
        (lambda path: path.write_text(MINIMAL, encoding="utf-16"), "is not UTF-8"),
        (lambda path: path.write_text("- a\n- b\n"), "not a mapping"),
        (lambda path: path.write_text(""), "not a mapping"),
        (lambda _: None, "no such configuration"),
    ],
    ids=["folder", "fifo", "loop", "dead link", "device", "20 MB", "bad byte", "UTF-16", "list", "empty", "missing"],
)
@pytest.mark.parametrize("extended", [False, True])
def test_what_is_no_config_is_refused_at_once_and_by_name(tmp_path, make, says, extended):
    make(tmp_path / "bad.yaml")
    top = tmp_path / "bad.yaml"
    if extended:
        top = tmp_path / "top.yaml"
        top.write_text("extends: bad.yaml\n")
    with pytest.raises(ConfigError) as caught:
        load_config(top)
    assert says in str(caught.value)
    assert "bad" in str(caught.value)


@pytest.mark.parametrize("name", ["x" * 5_000, "x" * 300 + "/y", "a\x00b", "x" * 100_000])
def test_a_name_that_no_disk_can_hold_is_no_configuration(name):
    with pytest.raises(ConfigError, match="no such configuration") as caught:
        load_config(name)
    assert len(str(caught.value)) < 1_000


def test_a_folder_like_a_preset_hides_nothing_and_no_chain_leads_back(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    assert load_config("demo").name == "grpo-demo"
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.yaml").write_text("extends: sub/../a.yaml\n" + MINIMAL)
    with pytest.raises(ConfigError, match="does not extend this one"):
        load_config(tmp_path / "a.yaml")


@pytest.mark.slow
def test_an_error_repeats_little_of_what_was_typed():
    for text in ("x" * 20_000_000, "y\n" * 500_000, "z" * 20_000_000 + "; the end"):
        error = DataError(text, place=text, fix=text)
        assert len(str(error)) < 10_000
        assert str(UserError.from_json(error.to_json())) == str(error)
    assert "the end" in str(error)
    assert "19,998,509 characters left out" in str(error)


@pytest.mark.parametrize("opening", ["[", "{a: ", "- ", "[x, ", "[{"])
def test_a_deep_text_is_read_no_further_than_its_limit(opening):
    """The scanner looks at every open bracket for every token, so a deep text took seconds."""
    text = "a: " * (opening != "- ") + opening * (MAX_CHARS // len(opening) - 10)
    loader = _Loader(text, "file.yaml")
    with pytest.raises(ConfigError, match="more than 50 levels deep"):
        loader.get_single_node()
    assert loader.index < 5_000


def test_a_text_with_many_faults_gets_as_many_hints_as_are_shown(monkeypatch):
    """A hint compares a key with every field there is: for a thousand keys that took seconds."""
    asked = []
    monkeypatch.setattr(load, "hint_for", lambda place: asked.append(place) or "a hint")
    with pytest.raises(ConfigError, match=r"\.\.\. 9[0-9][0-9] more faults"):
        check_config({f"key{number}": 1 for number in range(1_000)})
    assert 0 < len(asked) <= MAX_LINES
