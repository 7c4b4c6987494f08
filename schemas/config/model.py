"""Section `model`: the base model and its adapter."""

from collections.abc import Iterator
from typing import Annotated, Literal, Self

from pydantic import Field, PrivateAttr, StringConstraints

from schemas.config.section import Details, Section
from schemas.config.types import Address


class LoraConfig(Section):
    """Low-rank adapter (LoRA, arXiv:2106.09685), trained instead of all weights."""

    r: int = Field(16, ge=1, le=512, title="Rank")
    """Rank of the update matrices."""
    lora_alpha: int = Field(32, ge=1, le=100_000)
    """Scale: the update is multiplied by lora_alpha / r. A common choice is twice the rank."""
    lora_dropout: Details[float] = Field(0.0, ge=0.0, lt=1.0)
    """Dropout probability on the adapter's input while training."""
    target_modules: Details[Literal["all-linear"] | list[str]] = "all-linear"
    """Names of the layers that get an adapter, for example [q_proj, v_proj]. all-linear: every linear layer except the head."""
    use_rslora: Details[bool] = False
    """Scale by lora_alpha / sqrt(r) instead (rank-stabilised LoRA, arXiv:2312.03732)."""


TokenText = Annotated[str, StringConstraints(min_length=1, max_length=200, pattern=r"\S")]
"""Text of a token: not empty, and not only whitespace."""


class AddedToken(Section):
    """A token that the model's tokenizer gets in addition to its own."""

    token: TokenText
    """Its text, for example <search>."""
    special: bool = False
    """Special tokens are left out of the text that rewards and evaluation see. A stop string that contains one keeps it."""
    like: TokenText | None = None
    """Text that the token starts out like: its embedding begins as the mean of this text's tokens, so that the model emits it now
    and then, and rewards can tell. Empty: the mean of all tokens, which a model rarely emits."""


class ModelConfig(Section):
    """The base model."""

    path: Address = "embedded:base"
    """Local folder or hub id of a causal language model, or a registered model: NAME, NAME@ALIAS or NAME/VERSION. embedded:base
    is the tiny model that ships with this project."""
    revision: Details[str | None] = None
    """Hub revision (branch, tag or commit). Leave it empty for local folders."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "float32"
    """Precision of the base weights and of the forward pass. Adapter weights are always trained in float32. float16 scales the
    loss so that small gradients do not underflow; bfloat16 needs no scaling. auto: bfloat16 where the GPU or CPU that starts the
    first run multiplies faster in it, else float32; later runs of the same name keep to that."""
    merged_dtype: Details[Literal["auto", "float32", "bfloat16", "float16"]] = "auto"
    """Precision in which the merged model is saved. auto: the first of bfloat16, float16 and float32 that keeps at least 95 % of
    what training changed. A precision that you name and that keeps less is refused. The merge itself is computed in float32."""
    merged_system_prompt: Details[bool] = True
    """Put data.system_prompt into the chat template of the merged model, for conversations without a system message."""
    attn_implementation: Details[Literal["sdpa", "eager", "flash_attention_2"]] = "sdpa"
    """Attention kernel."""
    quantization: Details[Literal["none", "nf4"]] = "none"
    """nf4: train the adapter on a 4-bit base (QLoRA, arXiv:2305.14314; needs the extra [gpu]). Merging and evaluation use the
    unquantized base."""
    gradient_checkpointing: Details[bool] = False
    """Recompute activations in the backward pass. Uses less memory and is about a third slower."""
    lora: LoraConfig | None = Field(default_factory=LoraConfig, title="LoRA")
    """Adapter settings. null trains all weights (full fine-tuning)."""

    added_tokens: Details[list[TokenText | AddedToken]] = Field(default_factory=list)
    """Tokens that the tokenizer gets in addition to its own: strings, or {token: <search>, special: true}. Their embeddings start
    near the mean of the others and are trained, with an adapter as well. The merged model is published with them."""

    _locked: str | None = PrivateAttr(None)

    @property
    def sha256(self) -> str | None:
        """Of the local folder when the run started; None before, and for a model of a hub."""
        return self._locked

    def locked(self, sha256: str | None) -> Self:
        """The model whose files must have these contents in every step; no file or form shows it."""
        model = self.model_copy()
        model._locked = sha256
        return model

    def _faults(self) -> Iterator[str]:
        texts = [given if isinstance(given, str) else given.token for given in self.added_tokens]
        for text in texts:
            if texts.count(text) > 1:
                yield f"added_tokens names {text!r} twice; fix: name each token once"
        if self.quantization != "none" and self.lora is None:
            yield "a 4-bit base cannot be fully fine-tuned; fix: lora: {}, or quantization: none"
