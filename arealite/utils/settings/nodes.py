"""OmegaConf nodes of configurations: types, defaults that follow a key, text that is no reference.

Used by `config` and the launchers.
"""

import copy
import dataclasses
import functools
import re
from typing import Any

from omegaconf import DictConfig, OmegaConf


def schema_of(cls: type) -> DictConfig:
    """Return a new node with the types and defaults of a config dataclass.

    Defaults are made once per process: to copy a node takes a quarter of the time.
    """
    return copy.deepcopy(_make_schema(cls))


_make_schema = functools.cache(OmegaConf.structured)


def to_node(config: Any) -> DictConfig:
    """Return a configuration as a node without types."""
    return OmegaConf.create(_escaped(dataclasses.asdict(config)))


def gives_reference_dtype(values: DictConfig) -> bool:
    """Return whether a source gives `ref.dtype`, or all of `ref` as a reference to another section."""
    ref: Any = values._get_node("ref")
    if not isinstance(ref, DictConfig) or ref._is_none():
        return False
    return ref._is_interpolation() or ref._get_node("dtype") is not None


def follow_policy(node: DictConfig) -> None:
    """Give a reference whose `dtype` is not given that of the policy: the log-probs of both are compared."""
    ref: Any = node._get_node("ref") if "ref" in node else None
    if isinstance(ref, DictConfig) and not ref._is_none() and "dtype" in ref:
        ref["dtype"] = "${actor.dtype}" if "actor" in node else "${model.dtype}"


def _escaped(value: Any) -> Any:
    """Return nested plain values in which `${` is text for OmegaConf; a reference `${oc.…}` stays one."""
    if isinstance(value, dict):
        return {key: _escaped(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(each) for each in value]
    return re.sub(r"(\\*)\$\{(?!oc\.)", r"\1\1\\${", value) if isinstance(value, str) else value
