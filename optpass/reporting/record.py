"""The base of every record, and the record of a process, which reports, plans and audits share."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class Record(BaseModel):
    """Base of all records: unknown keys are an error, aliases (`schema`) are used on output.

    Figures are finite: JSON has no infinity, so a figure that is not known must be left out by who files the record.
    """

    model_config = ConfigDict(
        extra="forbid",
        populate_by_name=True,
        serialize_by_alias=True,
        allow_inf_nan=False,
        json_schema_serialization_defaults_required=True,  # every key is written, so the schema may require it
    )


class Document(Record):
    """A record that users are handed: `str()` is what the terminal shows of it, `repr()` one line.

    Of a run that compiled a few graphs, all fields in one line would be a million characters.
    """

    def __str__(self) -> str:
        from optpass.reporting.shown import shown  # here, because views import records

        return shown(self)

    def __repr__(self) -> str:
        filled = {name: value for name, value in self if isinstance(value, list) and value}
        counts = ", ".join(f"{len(value)} {name}" for name, value in filled.items())
        return f"<{type(self).__name__}: {counts or 'empty'}; print it to read it>"


class ProcessRecord(Record):
    """One process (rank) that contributed graphs."""

    pid: int = Field(description="Process id.")
    host: str = Field(description="Name of the machine.")
    rank: int = Field(default=0, description="Rank under torchrun.")
    world_size: int = Field(default=1, description="Number of ranks.")
    argv: list[str] = Field(default_factory=list, description="Command line.")
