"""The args that a checkpoint of Megatron's keeps -> the flags of a command that would say the same model. Torch-free.

An arg has the name of its flag, with underscores; flags that switch something off have the name of what they switch
off. Only what decides what a model computes is taken, the rest (layout, data, learning rates) is passed over. What is
known to change the model and can't be said here, and args of which nothing is known, are told as lost.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megaspec.core.errors import Problem, RecipeError
from megaspec.core.problems import show
from megaspec.megatron.command import Command
from megaspec.megatron.draft import RecipeDraft
from megaspec.megatron.flag import Fate, Flag
from megaspec.megatron.flags import BY_NAME
from megaspec.megatron.launcher import Ranks
from megaspec.megatron.model import translate_model

# Arg -> the flag that switches it off.
_SWITCHED_OFF = {
    "add_bias_linear": "--disable-bias-linear",
    "bias_gelu_fusion": "--no-bias-gelu-fusion",
    "add_position_embedding": "--no-position-embedding",
}
# Said apart, from what the checkpoint's tables have.
_VOCABULARY = {"vocab_size", "padded_vocab_size", "tokenizer_type", "tokenizer_model", "make_vocab_size_divisible_by"}
# Of two names for the same, the one that Megatron itself derives from the other.
_DERIVED_NAMES = {"encoder_num_layers", "encoder_seq_length"}
# What flags are lost for a training and say nothing of what a model computes.
_OF_TRAINING = {
    *("init_method_xavier_uniform", "pretrained_checkpoint", "moe_use_upcycling", "freeze_all_layers", "loss_scale"),
    *("fp8_quantizer_factory", "fp8_wgrad", "no_fp8_wgrad", "fp8_output_proj", "fp4_format", "fp4_param_gather"),
    *("te_precision_config_file", "main_grads_dtype", "moe_dispatch_fwd_dtype", "moe_combine_bwd_dtype", "yaml_cfg"),
    *("decoupled_lr", "decoupled_min_lr", "apply_wd_to_qk_layernorm", "no_weight_decay_cond_type", "dataloader_type"),
    *("data_args_path", "phase_transition_iterations", "dataloader_inter_document_masking", "fim_data", "sft"),
    *("iterations_to_skip", "mid_level_dataset_surplus", "allow_ambiguous_pad_tokens", "perform_rl_step"),
    *("vision_pretraining", "skip_train", "logits_save_dir", "logits_load_dir", "moe_enable_routing_replay"),
    *("moe_router_force_load_balancing", "moe_router_force_biased", "moe_expert_rank_capacity_factor", "model_spec"),
    *("fp32_residual_connection", "qk_clip", "epochs", "train_data", "valid_data", "test_data", "use_tfrecords"),
}
# Flags that do nothing at the commit that the table is of, and did something before.
_ONCE_ALIVE = {
    "openai_gelu": "GELU in the form with tanh, whatever is fused",
    "apply_residual_connection_post_layernorm": "the residual stream takes what the norm has made",
}
_YARN = "how far YaRN stretches is said by no flag, but by a setting of Megatron Core's that checkpoints don't keep"
_LATENT = (
    "checkpoints of latent attention are not read, since in what order its rotary features lie is not kept with them; "
    "take `megaspec hf import` of the model that Megatron's own tools export"
)
# What Megatron computes from flags and keeps beside them.
_COMPUTED = {
    *("rank", "world_size", "local_rank", "data_parallel_size", "params_dtype", "iteration", "curr_iteration"),
    *("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples", "do_train", "do_valid", "do_test"),
    *("transformer_pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size", "model_type"),
    *(
        "variable_seq_lengths",
        "start_weight_decay",
        "end_weight_decay",
        "data_parallel_random_init",
        "padded_vocab_size",
    ),
    *("num_floating_point_operations_so_far", "eod_id", "tokenizer", "phase_transition_iterations", "async_save"),
    *("finetune", "dataset_provider", "ckpt_format", "dist_ckpt_format", "ckpt_fully_parallel_save", "mmap_bin_files"),
    *("total_train_iters", "perform_initialization", "use_cpu_initialization", "pipeline_dtype", "autocast_dtype"),
    *("moe_token_drop_policy", "use_dist_ckpt", "use_persistent_ckpt_worker", "persist_layer_norm", "use_mcore_models"),
    *("async_tensor_model_parallel_allreduce", "gradient_accumulation_fusion", "masked_softmax_fusion"),
    *("bias_swiglu_fusion", "bias_dropout_fusion", "rope_fusion", "apply_rope_fusion", "cross_entropy_loss_fusion"),
    *(
        "overlap_p2p_comm",
        "batch_p2p_comm",
        "align_grad_reduce",
        "align_param_gather",
        "check_for_nan_in_loss_and_grad",
    ),
    *("create_attention_mask_in_dataloader", "tp_comm_bulk_dgrad", "tp_comm_bulk_wgrad", "tp_comm_overlap_ag"),
    *("tp_comm_overlap_rs", "tp_comm_split_ag", "tp_comm_split_rs", "fp8_wgrad", "use_ring_exchange_p2p"),
    *("use_one_sent_docs", "use_tokenizer_model_from_checkpoint_args", "scatter_gather_tensors_in_pipeline"),
    *("enable_one_logger", "barrier_with_L1_time", "disable_straggler_on_startup", "data_cache_path", "train_samples"),
}


@dataclass
class SavedModel:
    """What a checkpoint's args say of its model."""

    section: dict[str, Any]
    """The section `model` of a recipe."""
    padded_vocab: int | None
    """Rows of the vocabulary's tables there; None: not said."""
    lost: list[Problem] = field(default_factory=list)
    """What would compute something else."""
    notes: list[str] = field(default_factory=list)
    """What was assumed."""


def saved_model(args: Mapping[str, Any] | None, given: Command | None) -> SavedModel:
    """The model that args say, with the flags that the user adds (`given`).

    RecipeError: an arg of the wrong type, a flag that contradicts an arg, or sizes that are missing.
    """
    reading = _ArgsReading()
    for name, value in sorted((args or {}).items()):
        reading.read(name, value)
    _add_flags(reading, given)
    if "--multi-latent-attention" in reading.values:
        reading.refuse(f"{reading.written['--multi-latent-attention']}: {_LATENT}")
    padded = _vocabulary(reading, args or {}, given)
    for name in ("--num-layers", "--hidden-size", "--num-attention-heads", "--max-position-embeddings"):
        if name not in reading.values and not reading.problems:
            where = "which the checkpoint keeps no args for" if args is None else "which its args don't say"
            reading.problems.append(Problem("", f"{name} is missing, {where}; give it behind --", "", "megatron-flag"))
    if reading.problems:
        raise RecipeError(reading.problems)
    draft = RecipeDraft(Command(reading.values, reading.written, Ranks(1, "", "")), 1)
    translate_model(draft)
    if draft.problems:
        raise RecipeError(draft.problems)
    return SavedModel(draft.content["model"], padded, [*draft.lost, *reading.lost], reading.notes)


class _ArgsReading:
    """Flags while they are read from args."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.written: dict[str, str] = {}
        self.problems: list[Problem] = []
        self.lost: list[Problem] = []
        self.notes: list[str] = []

    def refuse(self, text: str) -> None:
        self.problems.append(Problem("", text, "", "megatron-flag"))

    def lose(self, text: str) -> None:
        self.lost.append(Problem("", text, "", "megatron-lost"))

    def put(self, flag: Flag, value: Any, written: str) -> None:
        self.values[flag.name] = value
        self.written[flag.name] = written

    def read(self, name: str, value: Any) -> None:
        """One arg."""
        if name in _VOCABULARY or name in _DERIVED_NAMES:
            return
        if name in _SWITCHED_OFF:
            if value is False:
                self.put(BY_NAME[_SWITCHED_OFF[name]], True, f"args.{name}=False")
            return
        if name in _ONCE_ALIVE and value is True:
            self.lose(f"args.{name}=True: {_ONCE_ALIVE[name]}; whether it did so then is not known")
            return
        if name == "position_embedding_type" and value == "yarn":
            self.lose(f"args.{name}=yarn: {_YARN}")
            return
        flag = BY_NAME.get(f"--{name.replace('_', '-')}") or BY_NAME.get(f"--{name}")
        if flag is None:
            self._unknown(name, value)
        elif flag.fate is Fate.TRANSLATED and flag.text.startswith("model."):
            self._translated(name, flag, value)
        elif flag.fate is Fate.LOST and name not in _OF_TRAINING and not _is_idle(name, value, flag):
            self.lose(f"args.{name}={_shown(value)}: {flag.reason}")

    def _unknown(self, name: str, value: Any) -> None:
        if _switches_off(name) or name in _COMPUTED or _is_nothing(value):
            return
        self.lose(f"args.{name}={_shown(value)}: an arg of which nothing is known")

    def _translated(self, name: str, flag: Flag, value: Any) -> None:
        if value is None or (flag.type is None and value is False):
            return
        found = _typed(flag, value)
        if found is None:
            self.refuse(f"args.{name}={_shown(value)} must be {flag.type or 'true or false'}")
            return
        self.put(flag, found, f"args.{name}={_shown(value)}")


def _switches_off(name: str) -> bool:
    """Whether it is what a flag such as --no-x or --disable-x switches off: x, use_x or enable_x."""
    bare = name.replace("_", "-")
    for part in (bare, bare.removeprefix("use-"), bare.removeprefix("enable-")):
        if any(f"--{word}-{part}" in BY_NAME for word in ("no", "disable", "not")):
            return True
    return False


def _typed(flag: Flag, value: Any) -> Any:
    """A value as the flag's words would give it; None: it is none that the flag takes."""
    if flag.type is None:
        return True if value is True else None
    if flag.many:
        values = value if isinstance(value, list | tuple) else [value]
        typed = [_one(flag, one) for one in values]
        return None if None in typed else typed
    return _one(flag, value)


def _one(flag: Flag, value: Any) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if flag.type == "int":
        return int(value) if is_number and value == value // 1 else None
    if flag.type == "float":
        return float(value) if is_number else None
    if flag.type == "text":
        is_list = isinstance(value, list) and all(type(one) is int for one in value)
        return f"{value}" if is_number or is_list or isinstance(value, str) else None
    words = (flag.type or "").split("|")
    return value if isinstance(value, str) and value in words else None


def _is_nothing(value: Any) -> bool:
    """Switched off, or left open."""
    return value is None or value is False or (isinstance(value, int | float | str | list | tuple) and not value)


def _is_idle(name: str, value: Any, flag: Flag) -> bool:
    """A lost flag that says what Megatron does anyway."""
    if _is_nothing(value) or name.startswith("retro_"):
        return True
    return flag.default is not None and isinstance(value, str | int | float) and _same(value, flag.default)


def _same(value: str | int | float, default: str) -> bool:
    try:
        return float(value) == float(default)
    except ValueError:
        return value == default


def _shown(value: Any) -> str:
    """A value that may be of any type, in a line."""
    if isinstance(value, str | int | float | bool | None):
        return show(f"{value}")
    if isinstance(value, list | tuple) and all(isinstance(one, str | int | float | None) for one in value):
        return show(", ".join(f"{one}" for one in value))
    return f"a {type(value).__name__}"


def _add_flags(reading: _ArgsReading, given: Command | None) -> None:
    """Flags behind `--` say what args leave open."""
    if given is None:
        return
    for name, value in given.values.items():
        flag = BY_NAME[name]
        if name in ("--vocab-size", "--padded-vocab-size"):
            continue
        if flag.fate is not Fate.TRANSLATED or not flag.text.startswith("model."):
            reading.refuse(f"{given.written[name]}: says nothing of a model; leave it out")
        elif name in reading.values and reading.values[name] != value:
            reading.refuse(
                f"{given.written[name]}: contradicts {reading.written[name]} of the checkpoint; leave it out"
            )
        else:
            reading.put(flag, value, given.written[name])


def _vocabulary(reading: _ArgsReading, args: Mapping[str, Any], given: Command | None) -> int | None:
    """Puts the vocabulary without its padding, as far as it is known. -> rows with the padding"""
    padded = args.get("padded_vocab_size")
    said = args.get("vocab_size")
    kind = args.get("tokenizer_type")
    for name, value in (("padded_vocab_size", padded), ("vocab_size", said)):
        if value is not None and (type(value) is not int or value < 1):
            reading.refuse(f"args.{name}={_shown(value)} must be a whole number of at least 1")
            return None
    if kind == "NullTokenizer" and said is not None:
        # it counts a token for the end of a document on top
        said += 1
    if said is None and kind == "GPT2BPETokenizer" and _pads_to(50257, padded, args):
        said = 50257
    if given is not None:
        padded = given.values.get("--padded-vocab-size", padded)
        wanted = given.values.get("--vocab-size", said)
        if said is not None and wanted != said:
            reading.refuse(f"--vocab-size {wanted}: contradicts args.vocab_size, by which it has {said}; leave it out")
        said = wanted
    if said is None and padded is not None:
        text = (
            f"the checkpoint does not say how many of its {padded} rows are tokens and how many padding: all are kept"
        )
        reading.notes.append(f"{text}; give -- --vocab-size N to leave the padding out")
        said = padded
    if said is None:
        reading.refuse("--vocab-size is missing: the checkpoint does not say its vocabulary; give it behind --")
        return None
    if padded is not None and said > padded:
        reading.refuse(f"vocab_size={said} is more than padded_vocab_size={padded}, which is the rows of its tables")
    reading.put(BY_NAME["--vocab-size"], said, f"args.vocab_size={said}")
    divisor = args.get("make_vocab_size_divisible_by")
    if type(divisor) is int and divisor >= 1:
        reading.put(BY_NAME["--make-vocab-size-divisible-by"], divisor, f"args.make_vocab_size_divisible_by={divisor}")
    return padded


def _pads_to(size: int, padded: int | None, args: Mapping[str, Any]) -> bool:
    """Whether a vocabulary becomes `padded` rows, by what the args say of padding."""
    divisor = args.get("make_vocab_size_divisible_by", 128)
    tp = args.get("tensor_model_parallel_size", 1)
    if not all(type(one) is int and one >= 1 for one in (divisor, tp, padded)):
        return False
    multiple = divisor * tp
    return -(-size // multiple) * multiple == padded
