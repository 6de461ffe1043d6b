"""Llama."""

# B sequences, T tokens, D model

from torch import Tensor, nn

from megaspec.model.llama.placement import placement
from megaspec.model.llama.spec import LlamaSpec
from megaspec.nn.attention import Attention, CausalCore, SequenceContext
from megaspec.nn.block import Block
from megaspec.nn.decoder import Decoder
from megaspec.nn.dropout import Dropout
from megaspec.nn.embedding import Embedding
from megaspec.nn.loss import OutputHead
from megaspec.nn.mlp import SwiGlu
from megaspec.nn.norm import RmsNorm
from megaspec.nn.rope import Rope
from megaspec_kernels.registry import Kernels


class Llama(Decoder):
    """Touvron et al. 2023, with grouped-query attention and Llama 3's rotary scaling."""

    def __init__(self, spec: LlamaSpec, kernels: Kernels):
        super().__init__()
        self.placement = placement(spec)
        self.embed = Embedding(spec.vocab_size, spec.d_model, pad_to=spec.vocab_pad_to)
        self.embed_dropout = Dropout(spec.dropout, "embed")
        self.rope = Rope(spec.d_head, spec.max_seq_len, spec.rope_base, spec.rope_scaling)
        self.layers = nn.ModuleDict({str(i): llama_block(spec, kernels, f"layers.{i}") for i in range(spec.n_layers)})
        self.norm = RmsNorm(spec.d_model, spec.norm_eps)
        self.head = OutputHead(spec.vocab_size, spec.d_model, kernels.cross_entropy, pad_to=spec.vocab_pad_to)
        self.tied = spec.tied_embeddings
        if self.tied:
            self.head.weight = self.embed.weight

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        return self.rope.angles(positions)

    def embed_tokens(self, tokens_BT: Tensor, context: SequenceContext) -> Tensor:
        return self.embed_dropout(self.embed(tokens_BT), context.noise)


def llama_block(spec: LlamaSpec, kernels: Kernels, name: str) -> Block:
    """One block; `name` tells its dropout sites apart."""
    attn = Attention(
        spec.d_model,
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        d_head=spec.d_head,
        bias=False,
        core=CausalCore(kernels.attention, spec.attention_dropout, f"{name}.attn.core"),
        out=Dropout(spec.dropout, f"{name}.attn"),
    )
    mlp = SwiGlu(spec.d_model, spec.d_ffn, out=Dropout(spec.dropout, f"{name}.mlp"))
    return Block(
        norm1=RmsNorm(spec.d_model, spec.norm_eps), attn=attn, norm2=RmsNorm(spec.d_model, spec.norm_eps), mlp=mlp
    )
