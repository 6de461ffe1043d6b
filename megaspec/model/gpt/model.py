"""GPT-2."""

# B sequences, T tokens, D model

from torch import Tensor, nn

from megaspec.model.gpt.placement import placement
from megaspec.model.gpt.spec import GptSpec
from megaspec.nn.attention import Attention, CausalCore, SequenceContext
from megaspec.nn.block import Block
from megaspec.nn.decoder import Decoder
from megaspec.nn.dropout import Dropout
from megaspec.nn.embedding import Embedding, LearnedPositions
from megaspec.nn.init import start_weights
from megaspec.nn.loss import OutputHead
from megaspec.nn.mlp import GeluMlp
from megaspec.nn.norm import LayerNorm
from megaspec_kernels.registry import Kernels


class Gpt(Decoder):
    """Radford et al. 2019: learned positions, LayerNorm before each sub-layer, GELU, biases."""

    embedding_names = ("embed", "positions", "embed_dropout")

    def __init__(self, spec: GptSpec, kernels: Kernels):
        super().__init__()
        self.placement = placement(spec)
        self.embed = Embedding(spec.vocab_size, spec.d_model, pad_to=spec.vocab_pad_to)
        self.positions = LearnedPositions(spec.max_seq_len, spec.d_model)
        self.embed_dropout = Dropout(spec.dropout, "embed")
        self.layers = nn.ModuleDict({str(i): gpt_block(spec, kernels, f"layers.{i}") for i in range(spec.n_layers)})
        self.norm = LayerNorm(spec.d_model, spec.norm_eps)
        self.head = OutputHead(spec.vocab_size, spec.d_model, kernels.cross_entropy, pad_to=spec.vocab_pad_to)
        self.tied = spec.tied_embeddings
        if self.tied:
            self.head.weight = self.embed.weight
        start_weights(self, std=spec.init_std, n_layers=spec.n_layers)

    def embed_tokens(self, tokens_BT: Tensor, context: SequenceContext) -> Tensor:
        return self.embed_dropout(self.positions(self.embed(tokens_BT), context.positions), context.noise)


def gpt_block(spec: GptSpec, kernels: Kernels, name: str) -> Block:
    """One block; `name` tells its dropout sites apart."""
    attn = Attention(
        spec.d_model,
        n_heads=spec.n_heads,
        n_kv_heads=spec.n_kv_heads,
        d_head=spec.d_head,
        bias=True,
        core=CausalCore(kernels.attention, spec.attention_dropout, f"{name}.attn.core"),
        out=Dropout(spec.dropout, f"{name}.attn"),
    )
    mlp = GeluMlp(spec.d_model, spec.d_ffn, out=Dropout(spec.dropout, f"{name}.mlp"))
    return Block(
        norm1=LayerNorm(spec.d_model, spec.norm_eps), attn=attn, norm2=LayerNorm(spec.d_model, spec.norm_eps), mlp=mlp
    )
