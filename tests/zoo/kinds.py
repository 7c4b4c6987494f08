"""Which models the zoo builds: every model type of AutoModelForCausalLM, and variants that switch something on.

`TINY` names the sizes that configs have in common; a config takes those that it has fields for. `CHANGES` says what a model type
needs beside them: scales and caps that act, windows shorter than the rows, layers of each kind. `VARIANTS` are further models of
a type, and `LEFT_OUT` the types that are no language models which can be built here.
"""

from typing import Any

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

Changes = dict[str, Any]

EOS, PAD = 318, 316
"""Tokens of the embedded tokenizer (grpo_tasks/demo/base), which has 320."""

TINY: Changes = {
    "vocab_size": 320, "vocab_size_per_layer_input": 320, "bos_token_id": None, "eos_token_id": EOS, "pad_token_id": PAD,
    "hidden_size": 64, "d_model": 64, "n_embd": 64, "emb_dim": 64, "embedding_dim": 64,
    "intermediate_size": 96, "ffn_dim": 96, "dff": 96, "n_inner": 96, "d_inner": 96, "decoder_ffn_dim": 96, "encoder_ffn_dim": 96,
    "num_hidden_layers": 4, "n_layer": 4, "n_layers": 4, "num_layers": 4, "decoder_layers": 3, "encoder_layers": 3,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "n_positions": 512, "max_seq_len": 512, "sliding_window": 16, "type_vocab_size": 2,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_topk": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_intermediate_size": 48, "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "mamba_d_state": 16, "mamba_d_head": 16, "mamba_n_heads": 8, "mamba_d_ssm": 128, "mamba_n_groups": 1, "state_size": 8,
    "index_head_dim": 16, "index_n_heads": 16, "index_topk": 8,
    # Text towers of wrappers and decoders of encoder-decoder models.
    "is_decoder": True, "word_embed_proj_dim": 64,
}  # fmt: skip
"""Sizes by the names that configs give them."""

LATENT: Changes = {
    "num_key_value_heads": 4, "q_lora_rank": 32, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8,
    "v_head_dim": 12, "head_dim": 8,
}  # fmt: skip
"""Multi-head latent attention (arXiv:2405.04434): keys have 24 numbers, values 12."""
GRANITE: Changes = {
    "logits_scaling": 8.0, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "attention_multiplier": 0.0625,
}  # fmt: skip
SCALED: Changes = {"rope_theta": 10000.0, "factor": 4.0}
YARN: Changes = SCALED | {"rope_type": "yarn", "original_max_position_embeddings": 32}
GEMMA: Changes = {"query_pre_attn_scalar": 16, "final_logit_softcapping": 5.0}
VISION: Changes = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "depth": 1, "num_attention_heads": 2, "num_heads": 2,
    "num_key_value_heads": 2, "head_dim": 16, "image_size": 28, "patch_size": 14,
}  # fmt: skip
"""Sizes of a tower that text does not pass."""
VISION_4: Changes = VISION | {"position_embedding_size": 16}
VISION_UNIFIED: Changes = {"mm_embed_dim": 32, "output_proj_dims": 32, "mm_posemb_size": 8, "patch_size": 4}
MIXED = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
"""Layers with a recurrent state between layers with attention."""

GEMMA_3: Changes = GEMMA | {"layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA_4: Changes = {
    "hidden_size_per_layer_input": 16, "global_head_dim": 32, "final_logit_softcapping": 5.0,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
GEMMA_4_UNIFIED: Changes = {name: value for name, value in GEMMA_4.items() if name != "hidden_size_per_layer_input"}
LLAMA_4: Changes = {
    "intermediate_size_mlp": 96, "attention_chunk_size": 16, "no_rope_layer_interval": 2, "interleave_moe_layer_step": 2,
    "floor_scale": 8, "attn_scale": 0.5,
}  # fmt: skip
QWEN_4: Changes = {
    "hc_count": 2, "hc_lowrank": 16, "ple_embed_dim": 16, "ngram_vocab_size_base": 500, "split_ngram_parts": 1,
    "heads_per_ngram": 2,
    "indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 1,
}  # fmt: skip

CHANGES: dict[str, Changes] = {
    "afmoe": {"mup_enabled": True, "num_dense_layers": 1},
    "axk1": LATENT,
    "axk2": LATENT,
    "bailing_hybrid": LATENT | {"layer_group_size": 2},
    "bamba": {"attn_layer_indices": [1, 3], "mamba_chunk_size": 8},
    "beam": {"final_logit_softcapping": 5.0},
    "codegen": {"rotary_dim": 8},
    "cohere": {"logit_scale": 0.25, "use_qk_norm": True},
    "cohere2": {"logit_scale": 0.25},
    "cohere2_moe": {"logit_scale": 0.25},
    "cohere_compass_text": {
        "logit_scale": 0.25, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "full_attention": None,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [3, 3, 2]},
        },
    },
    "cpmant": {"dim_ff": 96, "dim_head": 16, "prompt_length": 4},
    "cwm": {"bos_token_id": 317, "layer_types": ["full_attention", "sliding_attention"] * 2},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 2.0, "rope_theta": 10000.0},
        "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": LATENT,
    "deepseek_v4": {"o_groups": 2, "o_lora_rank": 16, "hc_mult": 2},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1},
    "emu3": {
        "text_config": {"bos_token_id": 317, "attention_dropout": 0.0},
        "vq_config": {"codebook_size": 8, "embed_dim": 8, "latent_channels": 8, "base_channels": 32, "channel_multiplier": [1]},
        "vocabulary_map": {"<image>": 310},
    },
    "exaone4": {"sliding_window_pattern": 2},
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96},
    "falcon_h1": {"lm_head_multiplier": 0.2, "embedding_multiplier": 3.0, "key_multiplier": 0.5, "mamba_chunk_size": 8},
    "fuyu": {"text_config": {"model_type": "persimmon"}, "image_size": 28, "patch_size": 4, "image_token_id": 310},
    "gemma2": GEMMA | {"attn_logit_softcapping": 2.0},
    "gemma3": {"text_config": GEMMA_3 | {"model_type": "gemma3_text"}, "vision_config": VISION, "image_token_index": 310},
    "gemma3_text": GEMMA_3,
    "gemma3n_text": {
        "final_logit_softcapping": 5.0, "hidden_size_per_layer_input": 16, "num_kv_shared_layers": 2, "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gemma4": {"text_config": GEMMA_4 | {"model_type": "gemma4_text"}, "vision_config": VISION_4, "audio_config": None},
    "gemma4_text": GEMMA_4,
    "gemma4_unified": {
        "text_config": GEMMA_4_UNIFIED | {"model_type": "gemma4_unified_text"}, "vision_config": VISION_UNIFIED,
        "audio_config": None,
    },
    "gemma4_unified_text": GEMMA_4_UNIFIED,
    "git": {"vision_config": VISION},
    "glm4_moe_lite": LATENT,
    "glm_moe_dsa": LATENT,
    "got_ocr2": {
        "text_config": {"model_type": "qwen2"}, "image_token_index": 310,
        "vision_config": VISION | {"output_channels": 16, "mlp_dim": 48, "global_attn_indexes": [0]},
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 16},
    "gptj": {"rotary_dim": 8},
    "granite": GRANITE,
    "granite_swa": GRANITE,
    "granitemoe": GRANITE,
    "granitemoe_swa": GRANITE,
    "granitemoehybrid": GRANITE | {"layer_types": MIXED, "mamba_chunk_size": 8, "mamba_d_head": 16},
    "granitemoeshared": GRANITE,
    "hrm_text": {"num_hidden_layers": 2},
    "hy_v4": LATENT,
    "hyperclovax": GRANITE | {"logits_scaling": 0.25},
    "inkling_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "sliding_window_size": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 8},
    "jetmoe": {"kv_channels": 16},
    "kimi_linear": LATENT | {"linear_head_dim": 16, "linear_num_heads": 4, "layer_types": MIXED},
    "lfm2": {"layer_types": ["conv", "conv", "full_attention", "conv"], "block_multiple_of": 16},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_dense_layers": 1},
    "llama4": {"text_config": LLAMA_4 | {"model_type": "llama4_text"}, "vision_config": VISION},
    "llama4_text": LLAMA_4,
    "longcat_flash": LATENT | {"ffn_hidden_size": 96, "qk_head_dim": 24, "zero_expert_num": 2, "expert_ffn_hidden_size": 48},
    "mamba": {"time_step_rank": 4},
    "mamba2": {"num_heads": 8, "n_groups": 1, "chunk_size": 8},
    "minicpm3": LATENT | {"dim_model_base": 16},
    "minimax": {"block_size": 8},
    "minimax_m3_vl_text": {"dense_intermediate_size": 96, "rotary_dim": 8},
    "mllama": {
        "text_config": {"model_type": "mllama_text_model", "cross_attention_layers": [], "bos_token_id": 317},
        "vision_config": VISION,
    },
    "modernbert-decoder": {"bos_token_id": 317, "local_attention": 16},
    "moss_transcribe_diarize": {"text_config": {"model_type": "qwen3"}, "audio_config": VISION, "audio_token_id": 310},
    "mpt": {"logit_scale": 0.5},
    "nanochat": {"final_logit_softcapping": 5.0},
    "nemotron_h": {
        "ssm_state_size": 16, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 1, "chunk_size": 8,
        "moe_shared_expert_intermediate_size": 48,
    },
    "olmo": {"clip_qkv": 2.0},
    "phi3": {"sliding_window": None},
    "phi4_multimodal": {
        "sliding_window": None, "vision_config": VISION, "audio_config": VISION | {"num_blocks": 1, "ext_pw_out_channel": 32},
    },
    "phimoe": {"lm_head_bias": True},
    "prophetnet": {
        "num_decoder_layers": 3, "num_encoder_layers": 3, "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
        "add_cross_attention": False,
    },
    "qwen4_exp": {"text_config": QWEN_4 | {"model_type": "qwen4_exp_text"}, "vision_config": VISION},
    "qwen4_exp_text": QWEN_4,
    "recurrent_gemma": {"lru_width": 64, "attention_window_size": 16, "logits_soft_cap": 5.0},
    "reformer": {
        "axial_pos_shape": (16, 32), "axial_pos_embds_dim": (16, 48), "feed_forward_size": 96, "attn_layers": ["local"] * 3,
        "attention_head_size": 16, "local_attn_chunk_length": 16,
    },
    "roc_bert": {
        "pronunciation_embed_dim": 16, "pronunciation_vocab_size": 320, "shape_embed_dim": 16, "shape_vocab_size": 320,
    },
    "rwkv": {"attention_hidden_size": 64, "rescale_every": 2, "context_length": 512},
    "smollm3": {"no_rope_layer_interval": 2},
    "xlm": {"causal": True},
    "xlnet": {"d_head": 16},
    "xlstm": {"num_blocks": 2, "chunk_size": 8, "qk_dim_factor": 1.0, "output_logit_soft_cap": 5.0},
    "xmod": {"default_language": "en_XX"},
    "youtu": LATENT,
    "zamba": {"attn_layer_period": 3, "attn_layer_offset": 2, "mamba_dt_rank": 8, "num_hidden_layers": 6},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "n_mamba_heads": 8, "chunk_size": 8},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}  # fmt: skip
"""What a model type needs beside `TINY`."""

VARIANTS: dict[str, tuple[str, str, Changes]] = {
    "bert_both_ways": ("bert", "is_decoder: false: a token sees what follows it", {"is_decoder": False}),
    "deepseek_v2_direct": ("deepseek_v2", "queries without a low rank", {"q_lora_rank": None}),
    "deepseek_v3_square": ("deepseek_v3", "value heads as wide as key heads", {"v_head_dim": 24}),
    "deepseek_v3_yarn": ("deepseek_v3", "rope: yarn", {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.8}}),
    "doge_moe": ("doge", "with experts", {"is_moe": True}),
    "falcon_7b": ("falcon", "one key head", {"new_decoder_architecture": False, "multi_query": True}),
    "falcon_alibi": (
        "falcon", "ALiBi",
        {
            "new_decoder_architecture": False, "multi_query": False, "parallel_attn": False, "num_kv_heads": 4, "alibi": True,
            "bias": True,
        },
    ),
    "gemma4_audio": ("gemma4", "with an audio tower", {"audio_config": {}}),
    "gemma4_moe": ("gemma4_text", "with experts", {"enable_moe_block": True, "top_k_experts": 2}),
    "gemma4_shared_keys": ("gemma4_text", "layers that share keys", {"num_kv_shared_layers": 2}),
    "gpt2_no_dropout": ("gpt2", "without dropout", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
    "gpt_bigcode_many_heads": ("gpt_bigcode", "a key head for each head", {"multi_query": False}),
    "gpt_neox_serial": ("gpt_neox", "attention and MLP in turn", {"use_parallel_residual": False}),
    "granitemoehybrid_attention": (
        "granitemoehybrid", "attention only, no experts",
        {"layer_types": ["full_attention"] * 4, "num_local_experts": 0, "position_embedding_type": "rope"},
    ),
    "llama_bias": ("llama", "with biases", {"attention_bias": True, "mlp_bias": True}),
    "llama_dynamic": (
        "llama", "rope: dynamic", {"max_position_embeddings": 24, "rope_parameters": SCALED | {"rope_type": "dynamic"}},
    ),
    "llama_linear": ("llama", "rope: linear", {"rope_parameters": SCALED | {"rope_type": "linear"}}),
    "llama_llama3": (
        "llama", "rope: llama3",
        {"rope_parameters": SCALED | {
            "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
        }},
    ),
    "llama_tied": ("llama", "tied embeddings", {"tie_word_embeddings": True}),
    "llama_yarn": ("llama", "rope: yarn", {"rope_parameters": YARN}),
    "mistral_full": ("mistral", "without a window", {"sliding_window": None}),
    "mpt_positions": ("mpt", "learned positions", {"attn_config": {"alibi": False, "clip_qkv": 2.0}}),
    "opt_projected": ("opt", "embeddings narrower than the layers", {"word_embed_proj_dim": 32}),
    "opt_post_norm": ("opt", "norms behind the layers", {"do_layer_norm_before": False}),
    "phi3_longrope": (
        "phi3", "rope: longrope",
        {"original_max_position_embeddings": 24, "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 24,
        }},
    ),
    "phi3_window": ("phi3", "with a window", {"sliding_window": 16}),
    "qwen2_tied": ("qwen2", "tied embeddings", {"tie_word_embeddings": True}),
    "qwen2_window": ("qwen2", "with a window", {"use_sliding_window": True, "max_window_layers": 2}),
    "stablelm_parallel": (
        "stablelm", "attention and MLP side by side", {"use_parallel_residual": True, "qk_layernorm": True, "use_qkv_bias": True},
    ),
    "zamba2_adapters": (
        "zamba2", "adapters on the shared attention",
        {"use_shared_attention_adapter": True, "num_mem_blocks": 2, "adapter_rank": 8, "num_key_value_heads": 4},
    ),
}  # fmt: skip
"""Further models: name -> (model type, what it has, changes beside those of the type)."""

ATTENTION: dict[str, str] = {"falcon_alibi": "sdpa"}
"""Whose attention is the truth where eager attention is not: Falcon's adds ALiBi twice, to the scores and in the mask
(modeling_falcon.py); torch's kernel adds it once."""

LEFT_OUT: dict[str, str] = {
    "blt": "reads bytes in patches that a second model cuts; it has no vocabulary of tokens",
    "gemma3n": "its vision tower needs the library timm; its text tower is gemma3n_text",
    "gemma4_assistant": "a drafter: it reads the hidden states of another model, not tokens",
    "gemma4_unified_assistant": "a drafter: it reads the hidden states of another model, not tokens",
    "moshi": "its tokens are audio codes as well as text, several at once",
    "musicgen": "its tokens are audio codes, several at once",
    "musicgen_melody": "its tokens are audio codes, several at once",
}
"""Model types of transformers' table that are not built, with the reason."""

ZOO: dict[str, tuple[str, Changes]] = {
    **{kind: (kind, CHANGES.get(kind, {})) for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind not in LEFT_OUT},
    **{name: (kind, CHANGES.get(kind, {}) | changes) for name, (kind, _, changes) in VARIANTS.items()},
}
"""Every model of the zoo: name -> (model type, changes)."""
