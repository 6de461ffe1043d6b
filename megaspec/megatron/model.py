"""Flags of the model -> the section `model`, part by part."""

from megaspec.megatron.draft import RecipeDraft
from megaspec.megatron.experts import translate_experts

_TOKENIZERS = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000}
_NORMS = {"LayerNorm": "layer", "RMSNorm": "rms"}
_POSITIONS = {
    "learned_absolute": "learned",
    "rope": "rotary",
    "yarn": "rotary",
    "mrope": "rotary",
    # GPTModel knows no relative positions, and adds none (megatron/core/models/gpt/gpt_model.py)
    "relative": "none",
    "none": "none",
}
_POSITION_FLAGS = ("--position-embedding-type", "--use-rotary-position-embeddings", "--no-position-embedding")
_LATENT_SIZES = {
    "--kv-lora-rank": "kv_rank",
    "--qk-head-dim": "d_nope",
    "--qk-pos-emb-head-dim": "d_rope",
    "--v-head-dim": "d_value",
}


def translate_model(draft: RecipeDraft) -> None:
    """Sizes, vocabulary, and each part: positions, norm, attention, feed-forward layer, experts."""
    draft.put("model.kind", "decoder")
    _sizes(draft)
    draft.put("model.dropout", draft["--hidden-dropout"], "--hidden-dropout", ours=0.0)
    tied = not draft["--untie-embeddings-and-output-weights"]
    draft.put("model.tied_embeddings", tied, "--untie-embeddings-and-output-weights", ours=False)
    _initialization(draft)
    _vocabulary(draft)
    _positions(draft)
    _norm(draft)
    if draft["--multi-latent-attention"]:
        _latent_attention(draft)
    else:
        _grouped_query_attention(draft)
    _feed_forward(draft)
    if draft.n_experts:
        translate_experts(draft)


def _sizes(draft: RecipeDraft) -> None:
    layers = "--num-layers" if draft.is_given("--num-layers") else "--encoder-num-layers"
    draft.put("model.n_layers", draft[layers], layers)
    draft.put("model.d_model", draft["--hidden-size"], "--hidden-size")
    draft.put("model.n_heads", draft["--num-attention-heads"], "--num-attention-heads")
    if draft["--group-query-attention"]:
        names = ("--group-query-attention", "--num-query-groups")
        draft.put("model.n_kv_heads", draft["--num-query-groups"], *names)
    if draft.is_given("--kv-channels") and not draft["--multi-latent-attention"]:
        draft.put("model.d_head", draft["--kv-channels"], "--kv-channels")
    width = draft["--ffn-hidden-size"]
    if width is None and draft["--hidden-size"] is not None:
        width = _default_width(draft["--hidden-size"], has_swiglu=draft["--swiglu"])
    draft.put("model.d_ffn", width, "--ffn-hidden-size")
    if draft.is_given("--max-position-embeddings"):
        draft.put("model.max_seq_len", draft["--max-position-embeddings"], "--max-position-embeddings")


def _default_width(d_model: int, *, has_swiglu: bool) -> int:
    """Of the feed-forward layer: 4 d, with SwiGLU two thirds of it in multiples of 64 (validate_args). Other gated
    layers keep 4 d there."""
    if has_swiglu:
        return int(d_model * 4 * 2 / 3 / 64) * 64
    return 4 * d_model


def _initialization(draft: RecipeDraft) -> None:
    std = draft["--init-method-std"]
    draft.put("model.init_std", std, "--init-method-std", ours=0.02)
    if draft["--embedding-init-method-std"] not in (None, std):
        draft.lose("--embedding-init-method-std", "the embedding starts with model.init_std, too")
    elif draft.is_given("--embedding-init-method-std"):
        draft.put("model.init_std", std, "--init-method-std", "--embedding-init-method-std")


def _vocabulary(draft: RecipeDraft) -> None:
    key, kind = "model.vocab_size", draft["--tokenizer-type"]
    names = [n for n in ("--tokenizer-type", "--tokenizer-model") if draft.is_given(n)]
    if draft.is_given("--vocab-size"):
        draft.put(key, draft["--vocab-size"], "--vocab-size", *names)
    elif draft.is_given("--padded-vocab-size"):
        draft.put(key, draft["--padded-vocab-size"], "--padded-vocab-size", *names)
    elif kind in _TOKENIZERS:
        draft.put(key, _TOKENIZERS[kind], *names, remark="its usual vocabulary; files of others differ")
    else:
        remark = "comes with the data; a number plans without them"
        draft.put(key, "auto", *(names or ["--vocab-size"]), remark=remark)
    pad = "--make-vocab-size-divisible-by"
    draft.put("model.vocab_pad_to", draft[pad], pad, ours=128)


def _positions(draft: RecipeDraft) -> None:
    written = draft["--position-embedding-type"]
    if draft["--use-rotary-position-embeddings"]:
        written = "rope"
    if draft["--no-position-embedding"] and written != "rope":
        way_out = "give --position-embedding-type none, or rope"
        draft.refuse("--no-position-embedding", f"with positions {written}, which Megatron refuses; {way_out}")
    kind = _POSITIONS[written]
    is_latent = draft["--multi-latent-attention"]
    if written == "mrope" or (written == "yarn" and is_latent):
        draft.lose("--position-embedding-type", "no such positions: rotary, learned or none")
    if is_latent:
        # It turns a part of queries and keys whatever the flags say; a table comes on top (LanguageModelEmbedding).
        if kind == "learned":
            what = "a table of positions beside the rotary part of latent attention, which alone is here"
            draft.lose("--position-embedding-type", what)
        kind = "rotary"
    draft.put("model.positions.kind", kind, *_POSITION_FLAGS)
    if kind != "rotary":
        return
    draft.put("model.positions.base", float(draft["--rotary-base"]), "--rotary-base", ours=10_000.0)
    _partial_rotation(draft, is_latent=is_latent)
    if draft["--use-rope-scaling"] and not is_latent:
        # with a factor of 8 whatever --rope-scaling-factor says: gpt_builder passes on the switch alone
        draft.put("model.positions.scaling.kind", "llama3", "--use-rope-scaling")
    is_yarn = written == "yarn" or (is_latent and draft["--rope-type"] != "rope")
    if is_yarn and draft["--rotary-scaling-factor"] != 1.0:
        draft.lose("--rotary-scaling-factor", "YaRN stretches the rotary frequencies; a recipe has scaling llama3")
    # YaRN with factor 1 stretches nothing
    draft.used.update(("--rope-type", "--rotary-scaling-factor"))


def _partial_rotation(draft: RecipeDraft, *, is_latent: bool) -> None:
    """How much of a head turns: its first features, of which int(percent · size) are taken, there as here."""
    name = "--rotary-percent"
    if is_latent and draft[name] != 1.0:
        draft.lose(name, "the rotary part of latent attention turns as a whole here")
        return
    draft.put("model.positions.fraction", draft[name], name, ours=1.0)


def _norm(draft: RecipeDraft) -> None:
    draft.put("model.norm.kind", _NORMS[draft["--normalization"]], "--normalization")
    draft.put("model.norm.eps", draft["--norm-epsilon"], "--norm-epsilon", ours=1e-5)
    if draft["--apply-layernorm-1p"]:
        draft.put("model.norm.weight", "one_plus", "--apply-layernorm-1p")


def _grouped_query_attention(draft: RecipeDraft) -> None:
    has_biases = not draft["--disable-bias-linear"]
    # --add-qkv-bias is for models without other biases; those with them have it anyway
    has_qkv_bias = has_biases or draft["--add-qkv-bias"]
    draft.put("model.attention.kind", "gqa")
    draft.put("model.attention.qkv_bias", has_qkv_bias, "--disable-bias-linear", "--add-qkv-bias", ours=False)
    draft.put("model.attention.out_bias", has_biases, "--disable-bias-linear", ours=False)
    if draft["--qk-layernorm"]:
        draft.put("model.attention.qk_norm", "per_head", "--qk-layernorm")
    draft.put("model.attention.dropout", draft["--attention-dropout"], "--attention-dropout", ours=0.0)


def _latent_attention(draft: RecipeDraft) -> None:
    draft.put("model.attention.kind", "mla", "--multi-latent-attention")
    if draft["--q-lora-rank"] is not None:
        draft.put("model.attention.q_rank", draft["--q-lora-rank"], "--q-lora-rank")
    for name, key in _LATENT_SIZES.items():
        draft.put(f"model.attention.{key}", draft[name], name)
    draft.put("model.attention.dropout", draft["--attention-dropout"], "--attention-dropout", ours=0.0)
    _lost_of_latent_attention(draft)


def _lost_of_latent_attention(draft: RecipeDraft) -> None:
    """Latents here always have an RMSNorm with a plain weight, queries without a latent have no norm of their own, and
    no product has a bias."""
    draft.used.add("--qk-layernorm")
    if not draft["--qk-layernorm"]:
        draft.lose("--multi-latent-attention", "without --qk-layernorm; latents are always normed here")
    else:
        if draft["--normalization"] != "RMSNorm":
            draft.lose("--normalization", "latents are normed by it, too; here always by RMSNorm")
        if draft["--apply-layernorm-1p"]:
            draft.lose("--apply-layernorm-1p", "norms of latents have this weight, too; here always a plain one")
        if draft["--q-lora-rank"] is None:
            # mla_qk_norm_config.py: linear_q_proj becomes a product with a norm of its own
            draft.lose("--q-lora-rank", "with --qk-layernorm, queries without a latent get a second norm; not here")
    if not draft["--disable-bias-linear"]:
        draft.lose("--disable-bias-linear", "latent attention has a bias on its output there, and none here")
    draft.note("--add-qkv-bias", "latent attention has no such biases")


def _feed_forward(draft: RecipeDraft) -> None:
    if draft["--swiglu"] and (draft["--squared-relu"] or draft["--quick-geglu"]):
        draft.refuse("--swiglu", "with --squared-relu or --quick-geglu; give one")
    if draft["--swiglu"]:
        draft.put("model.mlp.kind", "gated", "--swiglu")
        draft.put("model.mlp.activation", "silu", "--swiglu")
    elif draft["--squared-relu"]:
        draft.put("model.mlp.kind", "plain", "--squared-relu")
        draft.put("model.mlp.activation", "relu_squared", "--squared-relu")
    elif draft["--quick-geglu"]:
        draft.lose("--quick-geglu", "x · sigmoid(1.702 x) is no activation here; the nearest is gelu")
        draft.put("model.mlp.kind", "gated", "--quick-geglu")
        draft.put("model.mlp.activation", "gelu", "--quick-geglu")
    else:
        draft.put("model.mlp.kind", "plain", "--swiglu")
        _gelu(draft)
    draft.put("model.mlp.bias", not draft["--disable-bias-linear"], "--disable-bias-linear", ours=False)
    draft.note("--use-te-activation-func", "kernels and fusions are chosen from the GPU: kernels.*")


def _gelu(draft: RecipeDraft) -> None:
    """Megatron's GELU is exact (torch's F.gelu), but where it is fused with the bias in front of it (bias_gelu), or is
    Transformer Engine's: those compute GPT-2's form. Without biases nothing is fused (validate_args)."""
    key = "model.mlp.activation"
    if draft["--use-te-activation-func"]:
        draft.put(key, "gelu_tanh", "--use-te-activation-func", remark="Transformer Engine's GELU is GPT-2's form")
    elif draft["--disable-bias-linear"]:
        draft.put(key, "gelu", "--disable-bias-linear", remark="exact GELU, not fused where there is no bias")
    elif draft["--no-bias-gelu-fusion"]:
        draft.put(key, "gelu", "--no-bias-gelu-fusion", remark="exact GELU, where it is not fused")
    else:
        draft.put(key, "gelu_tanh", "--no-bias-gelu-fusion", remark="GPT-2's form, where it is fused with the bias")
