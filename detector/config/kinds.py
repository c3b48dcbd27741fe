"""The kinds of values that settings have, and the base of their groups."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from detector.config.reading import absolute
from detector.files import spelt_here
from detector.spelling import Words
from detector.values import nearest_multiple


def whole(value: Any) -> Any:
    """1e2 and 100.0 are the whole number 100."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def text(value: Any) -> Any:
    """A number is as good as its digits."""
    return str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


Fraction = Annotated[float, Field(ge=0, le=1)]
NotNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Whole = Annotated[int, BeforeValidator(whole)]
Count = Annotated[Whole, Field(ge=0)]
AtLeastOne = Annotated[Whole, Field(ge=1)]
Text = Annotated[str, BeforeValidator(text)]
FilePath = Annotated[  # a str is as good as a Path
    Path, BeforeValidator(text), Field(strict=False), AfterValidator(lambda path: Path(spelt_here(str(path))))
]
Nms = Annotated[
    bool | Literal["auto"],
    Words(),
    Field(description="of a model with two heads, whether the one that needs suppression is used; auto: true"),
]
Sampling = Annotated[
    Literal["uniform", "balanced"] | Fraction,
    Words(),
    Field(description="images with rare classes more often: by this power of rarity; balanced: 0.5"),
]


def listed(value: Any) -> Any:
    """One class alone is as good as a list of one, and '0,2' as good as [0, 2]."""
    if isinstance(value, str):
        return [part.strip() for part in value.split(",")]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else value


def named(value: Any) -> Any:
    """'a, b' is as good as [a, b], and a name alone as a list of one."""
    return [part for part in re.split(r"[,\s]+", value) if part] if isinstance(value, str) else value


def numbers(value: Any) -> Any:
    """'10,17' is as good as [10, 17]."""
    parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else []
    return [int(part) for part in parts] if len(parts) > 1 and all(map(str.isdecimal, parts)) else value


def some(value: list[int | str]) -> list[int | str]:
    if not value:
        raise ValueError("name at least one class, or leave it out for all")
    return value


Classes = Annotated[
    list[Whole | Text],
    BeforeValidator(listed),
    AfterValidator(some),
    Field(description="names or numbers of the classes whose boxes are learned and judged; left out: all"),
]
FirstLayers = Annotated[list[Annotated[Whole, Field(ge=1)]], Field(min_length=1)]  # of the stages after the first
STRIDE = 32  # image sides are multiples of it, whatever the network


def one_side(value: Any) -> Any:
    if isinstance(value, list):
        side = max((one for one in value if isinstance(one, int)), default=640)
        raise ValueError(f"the network's input is square: give one number, {side}")
    return value


def multiple_of_stride(value: int) -> int:
    if value % STRIDE:
        raise ValueError(f"must be a multiple of {STRIDE}; the nearest is {nearest_multiple(value, STRIDE)}")
    return value


Side = Annotated[
    Whole, Field(ge=STRIDE), BeforeValidator(one_side), AfterValidator(multiple_of_stride)
]  # of the network's input, pixels


def model_named(value: str, folder: Path) -> str:
    """v11n, for what this model is called elsewhere; a path made absolute where the text looks like one."""
    path = absolute(value, folder)
    known = re.fullmatch(r"(?:yolo)?v?(\d+)([a-z])(u|-p\d|)(?:\.ya?ml)?", value.lower())
    if known:
        number, scale, rest = known.groups()
        own = re.sub(rf"{number}{scale}{rest}(?=\.|$)", f"{number}{rest}", path.name, flags=re.IGNORECASE)
        if not path.exists() and not path.with_name(own).exists():
            return f"v{number}{scale}{rest}"
    return str(path) if path.suffix.lower() in (".yaml", ".yml", ".pt") else value


class Group(BaseModel):
    """Base of the groups: unknown keys, wrong types and later changes are errors."""

    of: ClassVar[str] = ""  # whose settings they are, for messages
    also: ClassVar[dict[str, str]] = {}  # other names of a setting that are taken
    located: ClassVar[dict[str, Callable[[str, Path], str]]] = {}  # what a text means that is written in a folder

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)
