"""What every decoder family shares."""

from megaspec.core.frozen import Auto, Depth, Frozen, PositiveFloat, PositiveInt, Probability


class TransformerSpec(Frozen):
    """A decoder-only transformer of equal blocks."""

    n_layers: Depth
    """Number of blocks."""
    d_model: PositiveInt
    """Width of the residual stream."""
    n_heads: PositiveInt
    """Query heads."""
    n_kv_heads: Auto[PositiveInt] = "auto"
    """Key and value heads (grouped-query attention). auto: n_heads."""
    d_head: Auto[PositiveInt] = "auto"
    """Size of one head. auto: d_model / n_heads."""
    d_ffn: Auto[PositiveInt] = "auto"
    """Width of the feed-forward layer. auto: 4 d_model for GPT-2, 8/3 d_model rounded down to 64 for Llama."""
    vocab_size: Auto[PositiveInt] = "auto"
    """Tokens in the vocabulary, unpadded. auto: that of the data's tokenizer."""
    vocab_pad_to: PositiveInt = 128
    """Each rank's share of the vocabulary is padded to a multiple of this many rows; padding is never saved."""
    max_seq_len: Auto[PositiveInt] = "auto"
    """Longest sequence in tokens that the model accepts. auto: data.seq_len."""
    tied_embeddings: bool = False
    """Use the input embedding as the output head."""
    norm_eps: PositiveFloat = 1e-5
    """Added to the variance in every norm."""
    dropout: Probability = 0.0
    """Dropout on the embedding and on the output of attention and feed-forward, as a probability."""
    attention_dropout: Probability = 0.0
    """Dropout on the attention weights, as a probability."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights; outputs into the residual stream get init_std / sqrt(2 n_layers)."""
