"""Which builder makes the model of a spec."""

from collections.abc import Callable, Mapping

from megaspec.model.decoder.model import decoder
from megaspec.model.decoder.spec import DecoderSpec
from megaspec.nn.decoder import Decoder

ModelBuilder = Callable[..., Decoder]
"""(spec, kernels, what makes its parts) -> the whole model on the device that torch makes tensors on"""

MODELS: Mapping[type[DecoderSpec], ModelBuilder] = {DecoderSpec: decoder}
