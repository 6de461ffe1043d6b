"""Llama."""

# B sequences, T tokens, D model

from torch import Tensor, nn

from megaspec.model.llama.placement import placement
from megaspec.model.llama.spec import LlamaSpec
from megaspec.nn.attention import Attention, CausalCore, SequenceContext
from megaspec.nn.block import Block, MoeBlock
from megaspec.nn.decoder import Decoder
from megaspec.nn.dropout import Dropout
from megaspec.nn.embedding import Embedding
from megaspec.nn.init import start_weights
from megaspec.nn.linear import Linear
from megaspec.nn.loss import OutputHead
from megaspec.nn.mlp import SwiGlu
from megaspec.nn.moe import Experts, Moe
from megaspec.nn.norm import RmsNorm
from megaspec.nn.rope import Rope
from megaspec.nn.router import Router
from megaspec_kernels.registry import Kernels


class Llama(Decoder):
    """Touvron et al. 2023, with grouped-query attention and Llama 3's rotary scaling, or as Qwen3 and Mixtral have it:
    with normed queries and keys, with experts."""

    def __init__(self, spec: LlamaSpec, kernels: Kernels):
        super().__init__()
        self.placement = placement(spec)
        self.embed = Embedding(spec.vocab_size, spec.d_model, pad_to=spec.vocab_pad_to)
        self.embed_dropout = Dropout(spec.dropout, "embed")
        self.rope = Rope(spec.d_head, spec.max_seq_len, spec.rope_base, spec.rope_scaling)
        with_experts = spec.moe.in_layers(spec.n_layers) if spec.moe else (False,) * spec.n_layers
        self.layers = nn.ModuleDict(
            {str(i): llama_block(spec, kernels, f"layers.{i}", with_experts=w) for i, w in enumerate(with_experts)}
        )
        self.norm = RmsNorm(spec.d_model, spec.norm_eps)
        self.head = OutputHead(spec.vocab_size, spec.d_model, kernels.cross_entropy, pad_to=spec.vocab_pad_to)
        self.tied = spec.tied_embeddings
        if self.tied:
            self.head.weight = self.embed.weight
        start_weights(self, std=spec.init_std, n_layers=spec.n_layers)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rope.angles(positions)

    def embed_tokens(self, tokens_BT: Tensor, context: SequenceContext) -> Tensor:
        return self.embed_dropout(self.embed(tokens_BT), context.noise)


def llama_block(spec: LlamaSpec, kernels: Kernels, name: str, *, with_experts: bool) -> Block | MoeBlock:
    """One block; `name` tells its sites of dropout and noise apart."""

    def norm(d: int) -> RmsNorm:
        return RmsNorm(d, spec.norm_eps)

    attn = Attention(
        spec.d_model,
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        d_head=spec.d_head,
        bias=False,
        core=CausalCore(kernels.attention, spec.attention_dropout, f"{name}.attn.core"),
        out=Dropout(spec.dropout, f"{name}.attn"),
        q_norm=norm(spec.d_head) if spec.qk_norm else None,
        k_norm=norm(spec.d_head) if spec.qk_norm else None,
    )
    norm1, norm2 = norm(spec.d_model), norm(spec.d_model)
    if with_experts:
        return MoeBlock(norm1=norm1, attn=attn, norm2=norm2, moe=llama_moe(spec, kernels, f"{name}.moe"))
    mlp = SwiGlu(spec.d_model, spec.d_ffn, out=Dropout(spec.dropout, f"{name}.mlp"))
    return Block(norm1=norm1, attn=attn, norm2=norm2, mlp=mlp)


def llama_moe(spec: LlamaSpec, kernels: Kernels, name: str) -> Moe:
    """The experts of one block."""
    own, d = spec.moe, spec.d_model
    # dropped out together with the routed experts
    shared = SwiGlu(d, own.d_shared, out=Dropout(0.0, f"{name}.shared")) if own.d_shared else None
    return Moe(
        Router(d, own, site=f"{name}.router"),
        Experts(own.n_experts, d, own.d_expert, kernel=kernels.grouped, unpermute=kernels.unpermute),
        shared=shared,
        shared_gate=Linear(d, 1) if own.shared_gate else None,
        pad=own.pad_to_capacity,
        out=Dropout(spec.dropout, name),
    )
