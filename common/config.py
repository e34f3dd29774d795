"""Settings: groups that each part owns, read once at start."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Settings(BaseModel):
    """A frozen group of settings. Field names are unique over all groups of a process.

    Each field has a ``description`` (shown by ``--help`` and in the configuration reference) and its bounds; it is
    read from ``--field-name``, ``HEADRACE_FIELD_NAME`` or ``field_name`` in the TOML file, in that order.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())
