"""What every family shares."""

from megaspec.core.frozen import Auto, Depth, Frozen, PositiveFloat, PositiveInt, Probability
from megaspec.nn.layer.spec import Mixer
from megaspec.nn.model_facts import ModelFacts


class TransformerSpec(Frozen):
    """Sizes of a decoder-only transformer."""

    n_layers: Depth
    """Number of layers."""
    d_model: PositiveInt
    """Width of the residual stream."""
    n_heads: PositiveInt
    """Query heads."""
    n_kv_heads: Auto[PositiveInt] = "auto"
    """Key and value heads (grouped-query attention). auto: n_heads."""
    d_head: Auto[PositiveInt] = "auto"
    """Size of one head. auto: d_model / n_heads, with latent attention d_nope + d_rope."""
    d_ffn: Auto[PositiveInt] = "auto"
    """Width of the feed-forward layer. auto: 4 d_model for a plain one, 8/3 d_model, rounded down to 64, for a gated
    one."""
    vocab_size: Auto[PositiveInt] = "auto"
    """Tokens in the vocabulary, unpadded. auto: that of the data's tokenizer."""
    vocab_pad_to: PositiveInt = 128
    """Each rank's share of the vocabulary is padded to a multiple of this many rows; padding is never saved."""
    max_seq_len: Auto[PositiveInt] = "auto"
    """Longest sequence in tokens that the model accepts. auto: data.seq_len."""
    tied_embeddings: bool = False
    """Use the input embedding as the output head."""
    dropout: Probability = 0.0
    """Dropout on the embedding and on the output of attention and feed-forward, as a probability."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights; outputs into the residual stream get it divided by the root of how
    many write into it, 2 n_layers in most models."""

    @property
    def mixers(self) -> tuple[tuple[Mixer, ...], ...]:
        """The sub-layers of every layer, in order. Also of a spec that breaks rules."""
        raise NotImplementedError

    @property
    def caps_scores(self) -> bool:
        """Some layer needs a kernel that caps attention scores. Also of a spec that breaks rules."""
        raise NotImplementedError

    @property
    def rotation_writes_gradient(self) -> bool:
        """In some layer the backward pass of rotary positions makes the whole gradient of the product before them. Also
        of a spec that breaks rules."""
        raise NotImplementedError

    def hides_keys(self, seq_len: int) -> bool:
        """In some layer a query of a sequence of so many tokens doesn't see all of the past. Also of a spec that breaks
        rules."""
        raise NotImplementedError

    @property
    def facts(self) -> ModelFacts:
        """What the model's parts say of themselves; of a spec without open fields."""
        raise NotImplementedError
