"""Choices among words, in any spelling: other cases, and what is written for them elsewhere. No torch."""

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args, get_origin

# `amp: true` and `half` are what precision is called where there is only on and off.
AMP = {
    "true": "auto", "yes": "auto", "on": "auto", "false": "fp32", "no": "fp32", "off": "fp32", "none": "fp32",
    "half": "fp16", "float16": "fp16", "16": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32",
    "32": "fp32",
}  # fmt: skip


def spelt(value: Any, options: Mapping[str, Any]) -> Any:
    """The option that a value means, by its text in small letters; the value itself where it means none."""
    return options.get(str(value).strip().lower(), value) if isinstance(value, str | bool | int) else value


class Words:
    """In an annotation: the words of its choices in any case, other spellings of them, and what is not to be had.

    also: {spelling: value}; told: {spelling: why not}. Spellings are in small letters.
    """

    def __init__(self, also: Mapping[str, Any] | None = None, told: Mapping[str, str] | None = None) -> None:
        self.also, self.told = dict(also or {}), dict(told or {})

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        options = {**self.also, **{option.lower(): option for option in _options(source)}}

        def validate(value: Any) -> Any:
            reason = spelt(value, self.told)
            if reason is not value:
                raise ValueError(reason)
            return spelt(value, options)

        return core_schema.no_info_before_validator_function(validate, handler(source))


def _options(annotation: Any) -> Iterator[str]:
    """The words of an annotation's Literals."""
    if get_origin(annotation) is Literal:
        yield from get_args(annotation)
    else:
        for part in get_args(annotation):
            yield from _options(part)
