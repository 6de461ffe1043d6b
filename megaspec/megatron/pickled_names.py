"""The names that a pickle of Megatron's may hold. Even these are never imported or called: they are read as data."""

_TORCH = frozenset(
    f"torch.{name}"
    for name in (
        *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "uint8", "int8", "int16"),
        *("int32", "int64", "bool", "complex64", "complex128"),
        *("DoubleStorage", "FloatStorage", "HalfStorage", "BFloat16Storage", "ByteStorage", "CharStorage"),
        *("ShortStorage", "IntStorage", "LongStorage", "BoolStorage", "Float8_e4m3fnStorage", "Float8_e5m2Storage"),
        *("Size", "device", "Tensor", "storage.UntypedStorage", "storage.TypedStorage", "nn.parameter.Parameter"),
        *("_utils._rebuild_tensor_v2", "_utils._rebuild_tensor_v3", "_utils._rebuild_parameter"),
        *("_utils._rebuild_parameter_with_state", "_tensor._rebuild_from_type_v2", "serialization._get_layout"),
        "distributed.checkpoint.planner._MEM_FORMAT_ENCODING",
        "distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
        *(f"distributed.checkpoint.metadata.{one}" for one in ("Metadata", "MetadataIndex", "StorageMeta")),
        *(f"distributed.checkpoint.metadata.{one}" for one in ("TensorStorageMetadata", "BytesStorageMetadata")),
        *(f"distributed.checkpoint.metadata.{one}" for one in ("ChunkStorageMetadata", "TensorProperties")),
        *(f"distributed.checkpoint.planner.{one}" for one in ("SavePlan", "WriteItem", "WriteItemType")),
        *(f"distributed.checkpoint.planner.{one}" for one in ("TensorWriteData", "BytesIOWriteData")),
        "distributed.checkpoint.filesystem._StorageInfo",
        "distributed.checkpoint.filesystem._StoragePrefix",
        "distributed._shard.sharded_tensor.metadata.TensorProperties",
        "distributed._shard.sharded_tensor.metadata.MEM_FORMAT_ENCODING",
    )
)
_OTHERS = frozenset(
    {
        "argparse.Namespace",
        "collections.OrderedDict",
        "collections.defaultdict",
        "collections.deque",
        "types.SimpleNamespace",
        "pathlib.PosixPath",
        "pathlib.Path",
        "pathlib.PurePosixPath",
        "datetime.datetime",
        "datetime.timedelta",
        "signal.Signals",
        "uuid.UUID",
        "_io.BytesIO",
        "_codecs.encode",
        "copyreg._reconstructor",
        "builtins.getattr",
        "builtins.object",
        "builtins.set",
        "builtins.frozenset",
        "builtins.bytes",
        "builtins.bytearray",
        "builtins.list",
        "builtins.dict",
        "builtins.int",
        "builtins.float",
        "builtins.str",
        "builtins.slice",
        "builtins.complex",
        "__builtin__.getattr",
        "__builtin__.object",
        "__builtin__.set",
        "__builtin__.frozenset",
        "__builtin__.bytes",
        "__builtin__.bytearray",
        "__builtin__.list",
        "__builtin__.dict",
        "__builtin__.int",
        "__builtin__.long",
        "__builtin__.slice",
        "numpy.ndarray",
        "numpy.dtype",
        "numpy.core.multiarray._reconstruct",
        "numpy.core.multiarray.scalar",
        "numpy._core.multiarray._reconstruct",
        "numpy._core.multiarray.scalar",
        "numpy._core.numeric._frombuffer",
        "numpy.core.numeric._frombuffer",
    }
)
# Enums, records of settings and of optimizer states, under names that change from release to release.
_PACKAGES = ("megatron.", "transformer_engine.", "transformer_engine_torch.", "apex.", "nvidia_resiliency_ext.")


def is_known_name(module: str, name: str) -> bool:
    """Whether it is one that Megatron's checkpoints have."""
    if module.startswith(_PACKAGES):
        return True
    full = f"{module}.{name}"
    return full in _TORCH or full in _OTHERS
