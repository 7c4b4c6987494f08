"""The operators of torch that the engine calls by position, and that torch may change without notice."""

import torch

from schemas.errors import ModelError

PASSED = {
    "_flash_attention_forward": "query key value cum_seq_q cum_seq_k max_q max_k dropout_p is_causal return_debug_mask"
    " * scale window_size_left window_size_right -> 5",
    "_flash_attention_backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
    " rng_state unused * scale window_size_left window_size_right -> 3",
    "_efficient_attention_forward": "query key value bias cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p"
    " custom_mask_type compute_log_sumexp * scale -> 6",
    "_efficient_attention_backward": "grad_out_ query key value bias out cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k"
    " logsumexp dropout_p philox_seed philox_offset custom_mask_type bias_requires_grad * scale -> 4",
    "_scaled_dot_product_flash_attention_for_cpu": "query key value dropout_p is_causal * attn_mask scale -> 2",
    "_scaled_dot_product_flash_attention_for_cpu_backward": "grad_out query key value out logsumexp dropout_p is_causal"
    " * attn_mask scale -> 3",
    "_fused_rms_norm": "input normalized_shape weight eps -> 2",
    "_fused_rms_norm_backward": "grad_out input normalized_shape rstd weight output_mask -> 2",
    "_unsafe_view": "self size -> 1",
    "gelu_backward": "grad_output self * approximate -> 1",
    "silu_backward": "grad_output self -> 1",
}
"""By name: what the engine passes by position, by name (behind *), and how many results it takes."""


def check_operators() -> None:
    """ModelError where this torch takes or returns something else than the engine passes and reads."""
    for name, passed in PASSED.items():
        operator = getattr(torch.ops.aten, name, None)
        if operator is None or not _fits(operator.default._schema, passed):
            raise ModelError(
                f"the engine does not know the operator {name} of torch {torch.__version__}",
                place=torch.__file__ or "torch",
                fix="pip install 'torch>=2.13,<2.14'",
            )


def _fits(schema: torch.FunctionSchema, passed: str) -> bool:
    given, results = passed.split(" -> ")
    by_position, _, by_name = (part.split() for part in given.partition("*"))
    taken = [argument.name for argument in schema.arguments if not argument.kwarg_only]
    left = [argument for argument in schema.arguments if argument.name not in {*by_position, *by_name}]
    known = {argument.name for argument in schema.arguments}
    optional = all(argument.has_default_value() for argument in left)
    return taken[: len(by_position)] == by_position and known >= {*by_name} and optional and len(schema.returns) == int(results)
