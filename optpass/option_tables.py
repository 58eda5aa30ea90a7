"""Options that are tables of their own: their keys, what each may be, and how a bare word is read.

One frozen class per such option. Which layer a value came from is `optpass.options`' business. Nothing here may import
torch.
"""

from __future__ import annotations

import typing
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from optpass.errors import ConfigError, did_you_mean


class TableOption(BaseModel):
    """An option with keys of its own, every one a choice among words; a word alone sets the first key."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    @classmethod
    def choices(cls, key: str) -> tuple[str, ...]:
        """The words that `key` may be."""
        return typing.get_args(cls.model_fields[key].annotation)

    @classmethod
    def read(cls, value: Any, place: str) -> Self:
        """The option from a word, a table, or an instance.

        Args:
            place: what to call the option in a message, e.g. `options: attention`.

        Raises:
            ConfigError: another type, an unknown key or an impossible word, naming place, value and the nearest word.
        """
        if isinstance(value, cls):
            return value
        first = next(iter(cls.model_fields))
        if isinstance(value, str):
            cls._check(first, value, place)
            return cls.model_validate({first: value})
        if not isinstance(value, Mapping):
            words = ", ".join(map(repr, cls.choices(first)))
            raise ConfigError(f"{place}={value!r} ({type(value).__name__}) is neither a word ({words}) nor a table")
        for key, word in value.items():
            if key not in cls.model_fields:
                nearest = did_you_mean(str(key), cls.model_fields)
                raise ConfigError(f"{place}: unknown key {key!r} (= {word!r}); {nearest}")
            cls._check(key, word, f"{place}.{key}")
        return cls.model_validate(dict(value))

    @classmethod
    def _check(cls, key: str, word: Any, place: str) -> None:
        try:
            cls.model_validate({key: word})
        except ValidationError:
            nearest = did_you_mean(word if isinstance(word, str) else "", cls.choices(key))
            raise ConfigError(f"{place}={word!r} is no choice here; {nearest}") from None

    def to_json(self) -> dict[str, Any]:
        """The option as a table of plain data, every key written out."""
        return self.model_dump(mode="json")


class AttentionOptions(TableOption):
    """What the attention pass may do. The defaults keep the results that eager would give."""

    mode: Literal["auto", "always", "off", "sdpa", "flex"] = Field(
        default="auto",
        description="Where hand-written attention is replaced by a fused kernel. 'auto': where the cost gate says that "
        "it pays; 'always': wherever it is proved to be the same, whatever it costs; 'sdpa', 'flex': as 'always', by "
        "scaled_dot_product_attention or FlexAttention only; 'off': nowhere.",
    )
    dropout: Literal["keep", "swap"] = Field(
        default="keep",
        description="Attention with active dropout: 'keep' leaves it unless the kernel draws the same random stream; "
        "'swap' takes the kernel's own stream, with the same probability.",
    )
    masked_rows: Literal["exact", "any"] = Field(
        default="exact",
        description="Queries whose keys are all masked: 'exact' gives what eager gives (NaN, or the average of the "
        "values); 'any' allows a kernel that gives zeros there.",
    )


#: Option -> the class that reads it.
TABLES: Mapping[str, type[TableOption]] = MappingProxyType({"attention": AttentionOptions})
