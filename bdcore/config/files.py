"""A configuration read from YAML files and dotted overrides; every fault is one line."""

from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from bdcore.config.grid import GridConfig
from bdcore.config.section import ConfigError, listed
from bdcore.config.study import Config
from bdcore.config.training import VIEW_PRESETS


def load_config(path: str | Path, overrides: list[str] | None = None, *, limit: int | None = None) -> Config:
    """Read YAML, apply `key.sub=value` overrides (values are YAML) and `limit` (prompts per context), validate.

    `extends: other.yaml` starts from another configuration: sections are merged, every other value replaced. Relative
    corpus and model folders are resolved against the file that names them. Raises ConfigError in one line.
    """
    path = Path(path).expanduser().resolve()
    raw = _read(path, [])
    for override in overrides or []:
        _apply(raw, override)
    if limit is not None:
        if limit < 1:
            raise ConfigError(f"limit = {limit}: at least 1 prompt per context")
        grid = raw["grid"] = raw.get("grid") or {}
        prompts = grid.get("prompts", GridConfig().prompts) if isinstance(grid, dict) else None
        if isinstance(prompts, int):  # anything else is for validation to name
            grid["prompts"] = min(limit, prompts)
    _resolve_paths(raw, path.parent)
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(_one_line(path, error)) from error


def _read(path: Path, seen: list[Path]) -> dict[str, Any]:
    """A configuration file over the one that it extends."""
    if path in seen:
        raise ConfigError(f"configuration {path}: extends itself by way of {seen[-1].name}")
    try:
        raw = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ConfigError(f"configuration {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration {path}: not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"configuration {path}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"configuration {path}: expected sections, found {type(raw).__name__}")
    other = raw.pop("extends", None)
    _resolve_paths(raw, path.parent)
    _expand_presets(raw)
    if other is None:
        return raw
    if not isinstance(other, str):
        raise ConfigError(f"configuration {path}: extends = {other!r}: give the name of a configuration file")
    return _merged(_read((path.parent / Path(other).expanduser()).resolve(), [*seen, path]), raw)


def _expand_presets(raw: dict[str, Any]) -> None:
    """Write presets out, so that overlays and overrides can change parts of them."""
    for stage in (raw.get("base"), raw.get("training")):
        if isinstance(stage, dict) and isinstance(stage.get("views"), str):
            stage["views"] = VIEW_PRESETS.get(stage["views"], stage["views"])  # validation names an unknown one


_WEIGHTS = frozenset({"budgets", "prefix_lengths", "mixture", "policy", "position_mode", "loss_a", "loss_c"})
"""Settings whose mappings are one value: an overlay replaces them whole."""


def _merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    out = dict(base)
    for key, value in over.items():
        inner = base.get(key)
        whole = key in _WEIGHTS or not (isinstance(inner, dict) and isinstance(value, dict))
        out[key] = value if whole else _merged(inner, value)  # pyright: ignore[reportArgumentType]
    return out


def _apply(raw: dict[str, Any], override: str) -> None:
    key, sign, text = override.partition("=")
    if not sign or not key.strip():
        raise ConfigError(f"override {override!r}: write it as section.field=value")
    *sections, last = key.strip().split(".")
    node: Any = raw
    for section in sections:
        inner = _entry(node, section, override)
        if inner is not None and not isinstance(inner, dict | list):
            raise ConfigError(f"override {override!r}: {section} is not a section")
        copy = list(inner) if isinstance(inner, list) else dict(inner or {})  # with aliases others hold the same one
        node[int(section) if isinstance(node, list) else section] = copy
        node = copy
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML") from error
    _entry(node, last, override)
    node[int(last) if isinstance(node, list) else last] = value


def _entry(node: Any, key: str, override: str) -> Any:
    """What a section has under a name, or a list at an index."""
    if isinstance(node, dict):
        return node.get(key)
    if not key.isdecimal() or int(key) >= len(node):
        raise ConfigError(f"override {override!r}: {key} is no entry of a list of {len(node)}")
    return node[int(key)]


def _resolve_paths(raw: dict[str, Any], folder: Path) -> None:
    grid = raw.get("grid")
    corpora = [*listed(raw.get("corpus")), *listed(grid.get("corpus") if isinstance(grid, dict) else None)]
    for node in corpora:
        if isinstance(node, dict) and isinstance(node.get("path"), str):
            node["path"] = str((folder / Path(node["path"]).expanduser()).resolve())
    models = [(node, "source") for node in (raw.get("verifier"), raw.get("drafter"))]
    more = grid.get("drafters") if isinstance(grid, dict) else None
    models += [(more, name) for name in more] if isinstance(more, dict) else []
    for node, name in models:
        if isinstance(node, dict) and isinstance(node.get(name), str) and node[name].startswith((".", "/", "~")):
            node[name] = str((folder / Path(node[name]).expanduser()).resolve())


def _one_line(path: Path, error: ValidationError) -> str:
    lines: list[str] = []
    for item in error.errors():
        where = ".".join(str(part) for part in item["loc"]) or "config"
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}: unknown key; {_siblings(item['loc'])}")
            continue
        message = item["msg"].removeprefix("Value error, ")
        given = item["input"]
        shown = "" if isinstance(given, dict) else f" = {given!r}"
        lines.append(f"{where}{shown}: {message}")
    return f"{path.name}: " + "; ".join(lines)


def _siblings(loc: tuple[int | str, ...]) -> str:
    model: Any = Config
    for part in loc[:-1]:
        if isinstance(part, int):  # an entry of a list
            continue
        field = model.model_fields.get(str(part)) if isinstance(model, type) and issubclass(model, BaseModel) else None
        if field is None:
            return "see the documentation"
        candidates = [field.annotation, *getattr(field.annotation, "__args__", ())]
        model = next((c for c in candidates if isinstance(c, type) and issubclass(c, BaseModel)), None)
    return "legal keys: " + ", ".join(model.model_fields) if model is not None else "see the documentation"
