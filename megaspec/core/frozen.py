"""The base class and the field types of every spec. Torch-free."""

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

T = TypeVar("T")

AUTO = "auto"
# A field that the resolver may fill. In a Recipe it may say "auto"; a Spec refuses to be made while one does.
Auto = T | Literal["auto"]

_SUFFIX = {"k": 10**3, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


class Frozen(BaseModel):
    """A closed, immutable, strictly typed section of a recipe. The docstring under a field is its documentation."""

    model_config = ConfigDict(
        strict=True,
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,
    )


class ByName(dict[str, T]):
    """Sections by names of the user's own. It has a hash, as sections have: nobody changes it once it is made."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))


SectionName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
# Of a section: NamedSections[LayerType].
NamedSections = Annotated[dict[SectionName, T], AfterValidator(ByName)]


def parse_count(value: Any) -> Any:
    """The whole number that `1e6`, `15T`, `1.5B` or `64k` stands for; anything else as it is, a text of digits too."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str):
        match = re.fullmatch(r"((?:0|[1-9]\d{0,30})(?:\.\d{1,30})?)([kKMBT])", value)
        if match:
            number, suffix = match.groups()
            whole, _, fraction = number.partition(".")
            scaled = int(whole + fraction) * _SUFFIX[suffix]
            if scaled % 10 ** len(fraction) == 0:
                return scaled // 10 ** len(fraction)
    return value


# A whole number that may be written 1e6, 15T, 1.5B or 64k (powers of ten).
Count = Annotated[int, BeforeValidator(parse_count)]
MOST = 10**18
PositiveCount = Annotated[Count, Field(gt=0, le=MOST)]
NonNegativeCount = Annotated[Count, Field(ge=0, le=MOST)]
# Ranks of an axis or of a run, and layers: what is counted one by one before a run.
Degree = Annotated[Count, Field(gt=0, le=2**20)]
Depth = Annotated[Count, Field(gt=0, le=2**16)]
PositiveInt = PositiveCount
NonNegativeInt = NonNegativeCount
Fraction = Annotated[float, Field(ge=0, le=1)]
Probability = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
