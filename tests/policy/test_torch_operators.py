"""The private operators of torch: what the engine passes is what this torch takes, and another torch is refused."""

import ast
import re
from pathlib import Path

import pytest
import torch

from grpo_tasks.policy import torch_operators
from grpo_tasks.policy.load import pick_device
from grpo_tasks.policy.torch_operators import PASSED, check_operators
from schemas.config.operations import ResourcesConfig
from schemas.errors import ModelError

ROOT = Path(torch_operators.__file__).parents[1]
FLASH = torch.ops.aten._flash_attention_backward.default._schema


CALL = re.compile(r"torch\.ops\.aten\.(\w+)")


def calls(text):
    """Operator, number of arguments by position, and names of the others, for each call. Modules may rename an operator."""
    tree, ours = ast.parse(text), {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and "torch.ops.aten" in (line := ast.get_source_segment(text, node)):
            ours |= dict(zip(re.findall(r"\w+", line.partition("=")[0]), CALL.findall(line), strict=True))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            found = CALL.fullmatch(ast.unparse(node.func))
            name = found[1] if found else ours.get(ast.unparse(node.func))
            # **_windowed(...) passes the two sides of a window.
            names = {word for keyword in node.keywords for word in (keyword.arg or "window_size_left window_size_right").split()}
            if name:
                yield name, len(node.args), names


def test_every_call_passes_what_is_recorded():
    texts = [path.read_text(encoding="utf-8") for path in ROOT.rglob("*.py")]
    used = {name for text in texts for name in CALL.findall(text)}
    assert used == {*PASSED}
    found = [call for text in texts if "torch.ops.aten" in text for call in calls(text)]
    # As a gradient of two arguments, it is called by the name of its activation.
    assert {name for name, _, _ in found} == used - {"silu_backward"}
    for name, count, names in found:
        by_position, _, by_name = (part.split() for part in PASSED[name].partition(" -> ")[0].partition("*"))
        assert (count, names - {*by_name}) == (len(by_position), set()), name


def test_this_torch_takes_what_is_passed():
    check_operators()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("Tensor out, Tensor logsumexp", "Tensor logsumexp, Tensor out"),
        ("Tensor rng_state, Tensor unused", "Tensor philox_seed, Tensor philox_offset"),
        ("Tensor unused, *", "Tensor unused, Tensor sinks, *"),
        ("SymInt? window_size_left", "SymInt? left"),
        ("(Tensor, Tensor, Tensor)", "(Tensor, Tensor, Tensor, Tensor)"),
    ],
)
def test_a_torch_with_another_operator_is_refused(monkeypatch, old, new):
    assert old in str(FLASH)
    changed = torch._C.parse_schema(str(FLASH).replace(old, new))
    monkeypatch.setattr(torch.ops.aten._flash_attention_backward.default, "_schema", changed)
    with pytest.raises(ModelError, match="does not know the operator _flash_attention_backward of torch 2") as refused:
        pick_device(ResourcesConfig(device="cpu"))
    assert refused.value.fix == "pip install 'torch>=2.13,<2.14'"


def test_a_new_optional_argument_is_no_reason_to_refuse(monkeypatch):
    changed = torch._C.parse_schema(str(FLASH).replace("window_size_right=None", "window_size_right=None, Tensor? sinks=None"))
    monkeypatch.setattr(torch.ops.aten._flash_attention_backward.default, "_schema", changed)
    check_operators()
