"""Every causal language model that transformers can make is trained rightly, or refused with a sentence. Nothing else."""

import json

import pytest
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.zoo import measure as measuring
from tests.zoo.kinds import LEFT_OUT, ZOO
from tests.zoo.measure import PATH, QUICK, measure, row

TABLE = json.loads(PATH.read_text(encoding="utf-8"))


def test_every_model_type_is_tabled_or_left_out_with_reason():
    assert TABLE["transformers"] == transformers.__version__, "run: python -m tests.zoo --write"
    assert {one["type"] for one in TABLE["models"].values()} | set(LEFT_OUT) == set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    assert set(TABLE["models"]) == set(ZOO)
    assert TABLE["left_out"] == LEFT_OUT
    assert all(reason for reason in LEFT_OUT.values())
    assert {one["way"] for one in TABLE["models"].values()} <= {"fast", "slow", "refused"}
    assert [name for name, one in TABLE["models"].items() if (one["way"] == "fast") == bool(one["sentences"])] == []
    # A refusal says what to do; an error of a library that shows through does not.
    assert [
        name for name, one in TABLE["models"].items() if one["way"] == "refused" and " fix: " not in one["sentences"][-1]
    ] == []


def test_a_policy_that_leaves_out_the_scale_of_its_logits_is_found(monkeypatch, tmp_path):
    real = measuring.trainable_policy

    def unscaled(*given, **named):
        policy = real(*given, **named)
        policy.get_base_model().config.logits_scaling = 1.0
        return policy

    monkeypatch.setattr(measuring, "trainable_policy", unscaled)
    verdict = measure("granite", tmp_path, whole=False)
    assert verdict.way == "wrong"
    assert min(verdict.differences[what] for what in ("training log-probs", "training entropies", "gradients")) > 1


@pytest.mark.filterwarnings("ignore")  # those of our own are part of the verdict; peft has a few for odd layers
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.long) for name in ZOO])
def test_a_zoo_model_trains_samples_and_merges_like_transformers_and_peft(name, tmp_path_factory):
    verdict = measure(name, tmp_path_factory.mktemp("zoo-model"), whole=name not in QUICK)
    assert verdict.faults == []
    assert row(verdict) == TABLE["models"][name]
