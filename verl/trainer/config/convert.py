"""Plain dictionaries into the typed configuration and back. No hydra, no OmegaConf: a worker may import this."""

import dataclasses
import difflib
import types
import typing
from functools import cache
from typing import Annotated, Any, Literal, TypeVar

import yaml

from verl.trainer.config.schema import Config, Range

T = TypeVar("T")


@cache
def field_types(cls: type) -> dict[str, Any]:
    """Field name -> type of a config dataclass, ``Annotated`` kept."""
    return typing.get_type_hints(cls, include_extras=True)


@cache
def known_keys(cls: type = Config, prefix: str = "") -> tuple[str, ...]:
    """Every dotted key, sections included, in the schema's order."""
    keys: list[str] = []
    for name, hint in field_types(cls).items():
        keys.append(prefix + name)
        if dataclasses.is_dataclass(hint):
            keys.extend(known_keys(hint, f"{prefix}{name}."))
    return tuple(keys)


def nearest_key(key: str) -> str | None:
    """The key that ``key`` most likely means: the same last part in another section, else the closest spelling."""
    leaves = {known: known.rpartition(".")[2] for known in known_keys() if known not in _sections()}
    leaf = key.rpartition(".")[2]
    same_leaf = [known for known in leaves if leaves[known] == leaf]
    if same_leaf:
        return difflib.get_close_matches(key, same_leaf, n=1, cutoff=0.0)[0]
    close = difflib.get_close_matches(leaf, set(leaves.values()), n=3, cutoff=0.7)
    pool = [known for known in leaves if leaves[known] in close] or list(leaves)
    return next(iter(difflib.get_close_matches(key, pool, n=1, cutoff=0.6 if close else 0.8)), None)


def unknown_key(key: str) -> ValueError:
    section = key.rpartition(".")[0]
    if near := nearest_key(key):
        hint = f"did you mean {near}?"
    elif section in _sections():
        names = [known.rpartition(".") for known in known_keys()]
        hint = f"{section} has {', '.join(leaf for parent, _, leaf in names if parent == section)}"
    else:
        hint = "python -m verl.trainer.main_ppo --help lists them all"
    return ValueError(f"unknown key {key}; {hint}")


@cache
def _sections() -> frozenset[str]:
    return frozenset(known.rpartition(".")[0] for known in known_keys()) - {""}


def from_dict(data: dict[str, Any], cls: type[T] = Config, prefix: str = "") -> T:
    """Build a config dataclass; missing keys take their defaults.

    Raises ValueError for an unknown key, a value of the wrong type or out of its range, naming the key.
    """
    if not isinstance(data, dict):
        raise ValueError(f"{prefix.rstrip('.')}={data!r} is a section; set its keys, such as {prefix}{_first_key(cls)}")
    hints = field_types(cls)
    for name in data:
        if name not in hints:
            raise unknown_key(f"{prefix}{name}")
    return cls(**{name: _convert(value, hints[name], f"{prefix}{name}") for name, value in data.items()})


def to_dict(config: Any) -> Any:
    """Nested plain dictionary with lists for tuples: what YAML and the trackers take."""
    if isinstance(config, tuple):
        return list(config)
    if not dataclasses.is_dataclass(config):
        return config
    return {field.name: to_dict(getattr(config, field.name)) for field in dataclasses.fields(config)}


def config_to_yaml(config: Config) -> str:
    """The configuration as resolved; ``from_dict(yaml.safe_load(text))`` gives it back."""
    return yaml.dump(to_dict(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that writes floats so that YAML 1.1 reads them back as floats (``1.0e-06``, never ``1e-06``)."""


def _float(dumper: yaml.SafeDumper, value: float) -> yaml.Node:
    text = repr(value)
    if "e" in text and "." not in text:
        text = text.replace("e", ".0e")
    special = {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}
    return dumper.represent_scalar("tag:yaml.org,2002:float", special.get(text, text))


_Dumper.add_representer(float, _float)


def _first_key(cls: type) -> str:
    return next(iter(field_types(cls)))


def _convert(value: Any, hint: Any, key: str) -> Any:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return from_dict(value, hint, f"{key}.")
    if origin is Annotated:
        number = _convert(value, args[0], key)
        for bounds in args[1:]:
            if isinstance(bounds, Range) and number not in bounds:
                raise ValueError(f"{key}={value} is out of range; it must be {bounds}")
        return number
    if origin in (types.UnionType, typing.Union):
        inner = next(arg for arg in args if arg is not type(None))
        return None if value is None else _convert(value, inner, key)
    if origin is Literal:
        return _choice(value, args, key)
    if origin is tuple:
        return _tuple(value, args, key)
    return _scalar(value, hint, key)


def _choice(value: Any, choices: tuple[str, ...], key: str) -> str:
    if value in choices:
        return value
    near = difflib.get_close_matches(str(value), choices, n=1)
    hint = f"did you mean {near[0]}? known: " if near else "choose one of "
    raise ValueError(f"{key}={value} is unknown; {hint}{', '.join(choices)}")


def _tuple(value: Any, args: tuple[Any, ...], key: str) -> tuple[Any, ...]:
    items = [] if value is None else list(value) if isinstance(value, list | tuple) else [value]
    if args[-1] is Ellipsis:
        return tuple(_convert(item, args[0], f"{key}[{i}]") for i, item in enumerate(items))
    if len(items) != len(args):
        raise ValueError(f"{key}={value} has {len(items)} values; it takes {len(args)}, as in {key}=[a,b]")
    return tuple(_convert(item, arg, f"{key}[{i}]") for i, (item, arg) in enumerate(zip(items, args, strict=True)))


def _scalar(value: Any, kind: type, key: str) -> Any:
    if kind is bool:
        words = {"true": True, "false": False}
        if isinstance(value, bool) or str(value).lower() in words:
            return value if isinstance(value, bool) else words[str(value).lower()]
        raise ValueError(f"{key}={value!r} is not true or false")
    if kind is str:
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return str(value)
        if value is None:  # the family writes null for "none"
            return ""
        raise ValueError(f"{key}={value!r} is not text")
    try:
        if isinstance(value, bool) or isinstance(value, str) and not value.strip():
            raise ValueError
        number = float(value)
        if kind is int and number != int(number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        wanted = "a whole number" if kind is int else "a number"
        raise ValueError(f"{key}={value!r} is not {wanted}") from None
    return int(number) if kind is int else number
