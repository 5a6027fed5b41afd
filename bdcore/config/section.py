"""What every section of the configuration is, and the values that several of them take."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict


class ConfigError(ValueError):
    """Bad user input. The message names the field, the value and what would be legal."""


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def listed(value: Any) -> Any:
    """One value where a list is meant."""
    return value if isinstance(value, list) else [value]


def weighed(value: Any) -> Any:
    """One value where weights are meant: it alone."""
    return {value: 1.0} if isinstance(value, str) else value


def check_weights(name: str, weights: Mapping[Any, float]) -> None:
    if not weights or min(weights.values()) < 0 or sum(weights.values()) <= 0:
        raise ValueError(f"{name} = {weights}: weights must be >= 0 and not all 0")
