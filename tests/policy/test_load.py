import torch
from transformers import AutoModelForCausalLM, Gemma2Config

from grpo_tasks.policy.load import load_base, pick_device
from schemas.config.model import ModelConfig
from schemas.config.operations import ResourcesConfig
from schemas.results.model import ModelRef

SHAPE = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}


def test_capped_attention_scores_are_capped(tmp_path):
    torch.manual_seed(1)
    config = Gemma2Config(**SHAPE, head_dim=16, vocab_size=320, attn_logit_softcapping=0.5)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.mul_(20.0)  # scores so large that the caps matter
    model.save_pretrained(tmp_path)
    ids = torch.randint(1, 320, (1, 20), generator=torch.Generator().manual_seed(2))
    loaded = load_base(ModelRef(path=str(tmp_path)), ModelConfig(), device=torch.device("cpu"), dtype="float32")
    torch.testing.assert_close(loaded(ids).logits, model(ids).logits, rtol=1e-4, atol=1e-5)


def test_deterministic_kernels_do_not_fill_new_memory():
    kept = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        pick_device(ResourcesConfig(device="cpu"))
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    finally:
        torch.use_deterministic_algorithms(kept[0], warn_only=kept[1])
