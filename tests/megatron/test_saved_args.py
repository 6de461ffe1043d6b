"""Args that checkpoints keep, as the flags of a command."""

import pytest

from megaspec.core.errors import RecipeError
from megaspec.megatron.command import read_command
from megaspec.megatron.draft import RecipeDraft
from megaspec.megatron.model import translate_model
from megaspec.megatron.pickled import Global
from megaspec.megatron.saved_args import saved_model

SMALL = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "padded_vocab_size": 128,
    "vocab_size": 100,
    "params_dtype": Global("torch", "bfloat16"),
}

WORDS = "--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 32 --vocab-size 100"
ROPE = {"position_embedding_type": "rope"}


def section(**changed: object) -> dict:
    saved = saved_model(SMALL | changed, None)
    assert saved.lost == []
    return saved.section


@pytest.mark.parametrize(
    ("args", "flags"),
    [
        ({}, ""),
        ({"add_bias_linear": False, "swiglu": True}, "--disable-bias-linear --swiglu"),
        ({"add_bias_linear": False, "add_qkv_bias": True}, "--disable-bias-linear --add-qkv-bias"),
        ({"bias_gelu_fusion": False}, "--no-bias-gelu-fusion"),
        ({"group_query_attention": True, "num_query_groups": 2}, "--group-query-attention --num-query-groups 2"),
        ({"use_rotary_position_embeddings": True}, "--use-rotary-position-embeddings"),
        (
            {"position_embedding_type": "rope", "rotary_base": 500_000},
            "--position-embedding-type rope --rotary-base 500000",
        ),
        (
            {"position_embedding_type": "rope", "use_rope_scaling": True},
            "--position-embedding-type rope --use-rope-scaling",
        ),
        ({"normalization": "RMSNorm", "norm_epsilon": 1e-6}, "--normalization RMSNorm --norm-epsilon 1e-6"),
        ({"apply_layernorm_1p": True, "qk_layernorm": True}, "--apply-layernorm-1p --qk-layernorm"),
        ({"kv_channels": 8, "ffn_hidden_size": 40}, "--kv-channels 8 --ffn-hidden-size 40"),
        ({"untie_embeddings_and_output_weights": True}, "--untie-embeddings-and-output-weights"),
        (
            {"num_experts": 4, "moe_layer_freq": [0, 1], "moe_router_load_balancing_type": "aux_loss"},
            "--num-experts 4 --moe-layer-freq [0]+[1] --moe-router-load-balancing-type aux_loss",
        ),
        (
            {
                "num_experts": 4,
                "moe_aux_loss_coeff": 0.01,
                "moe_router_score_function": "sigmoid",
                "moe_router_topk": 1,
            },
            "--num-experts 4 --moe-aux-loss-coeff 0.01 --moe-router-score-function sigmoid --moe-router-topk 1",
        ),
    ],
    ids=str,
)
def test_they_say_the_model_that_a_command_says(args, flags):
    line = (
        f"--num-layers 2 --hidden-size 16 --num-attention-heads 4 --max-position-embeddings 32 --vocab-size 100 {flags}"
    )
    draft = RecipeDraft(read_command(line.split()), 1)
    translate_model(draft)
    assert section(**args) == draft.content["model"]


@pytest.mark.parametrize(
    ("args", "flags", "rows"),
    [
        ({}, "", 100),
        ({"tokenizer_type": "HuggingFaceTokenizer"}, "", 100),
        # it adds the end of a document
        ({"tokenizer_type": "NullTokenizer"}, "", 101),
        ({"vocab_size": None, "tokenizer_type": "GPT2BPETokenizer", "padded_vocab_size": 50_304}, "", 50_257),
        # another file of it, since it would be padded otherwise
        ({"vocab_size": None, "tokenizer_type": "GPT2BPETokenizer", "padded_vocab_size": 50_432}, "", 50_432),
        ({"vocab_size": None}, "", 128),
        ({"vocab_size": None}, "--vocab-size 90", 90),
        ({"vocab_size": None, "padded_vocab_size": None}, "--vocab-size 90", 90),
    ],
    ids=str,
)
def test_the_vocabulary_without_its_padding(args, flags, rows):
    given = read_command(flags.split()) if flags else None
    saved = saved_model(SMALL | args, given)
    assert saved.section["vocab_size"] == rows
    assert bool(saved.notes) == (rows == (SMALL | args)["padded_vocab_size"])


@pytest.mark.parametrize(
    ("args", "flags", "told"),
    [
        ({"vocab_size": None, "padded_vocab_size": None}, "", "--vocab-size is missing"),
        ({"vocab_size": 0}, "", "args.vocab_size=0 must be a whole number"),
        ({}, "--vocab-size 90", "contradicts args.vocab_size"),
        ({"vocab_size": 200}, "", "vocab_size=200 is more than padded_vocab_size=128"),
        ({"hidden_size": None}, "", "--hidden-size is missing, which its args don't say"),
        ({"hidden_size": [16]}, "", "args.hidden_size=16 must be int"),
        ({"hidden_size": Global("torch", "float32")}, "", "args.hidden_size=a Global must be int"),
        ({"swiglu": "yes"}, "", "args.swiglu=yes must be true or false"),
        ({"normalization": "BatchNorm"}, "", "args.normalization=BatchNorm must be LayerNorm|RMSNorm"),
    ],
)
def test_what_is_wrong_with_them_is_told(args, flags, told):
    with pytest.raises(RecipeError) as error:
        saved_model(SMALL | args, read_command(flags.split()) if flags else None)
    assert told in str(error.value)


def test_a_checkpoint_without_args_takes_flags():
    assert saved_model(None, read_command(WORDS.split())).section == section()
    with pytest.raises(RecipeError, match="which the checkpoint keeps no args for"):
        saved_model(None, read_command(WORDS.split()[2:]))


@pytest.mark.parametrize(
    "args",
    [
        {"mtp_num_layers": 1},
        {"softmax_type": "learnable"},
        {"attention_output_gate": True},
        {"use_mup": True},
        {"no_rope_freq": 4},
        {"activation_func_clamp_value": 7.0},
        {"of_a_fork": True},
        # a flag of a fork
        {"post_layer_norm": True},
    ],
    ids=str,
)
def test_what_computes_something_else_is_lost(args):
    [problem] = saved_model(SMALL | args, None).lost
    assert str(problem).startswith(f"args.{next(iter(args))}=")


def test_what_is_of_training_alone_is_passed_over():
    args = {
        "lr": 1e-4,
        "dataloader_type": "cyclic",
        "save": "there",
        "data_path": ["a"],
        "world_size": 8,
        "fp8_format": None,
    }
    assert section(**args, softmax_type="vanilla", bias_swiglu_fusion=True, loss_scale=4.0) == section()
