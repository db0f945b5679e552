"""Strict YAML: no duplicate keys, no alias bombs, no recursive values."""

from __future__ import annotations

from typing import Any

import yaml

MAX_NODES = 100_000
"""Maximum number of values in a file; those of aliases count each time they are used."""
_MERGE = "tag:yaml.org,2002:merge"


def read_yaml(text: str) -> Any:
    """Reads a YAML file.

    Raises:
        ValueError: It is not YAML, a key appears twice, or it is nested or repeated without bound.
    """
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _size(node, {}, set())
        return _made(loader, node)
    except yaml.YAMLError as error:
        raise ValueError(f"not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ValueError("values are nested too deeply") from None


def _made(loader: yaml.SafeLoader, node: yaml.Node) -> Any:
    try:
        return loader.construct_document(node)
    except ValueError as error:  # such as a date with 13 months, or a number with thousands of digits
        raise ValueError(f"not a value: {error}") from None


def _size(node: yaml.Node, known: dict[yaml.Node, int], above: set[yaml.Node]) -> int:
    """Number of values that a node stands for; raises ValueError if there are too many."""
    if node in known:
        return known[node]
    if node in above:
        raise ValueError(f"line {_line(node)}: a value contains itself")
    above.add(node)
    size = 1
    if isinstance(node, yaml.MappingNode):
        _check_keys(node)
        size += sum(_size(child, known, above) for pair in node.value for child in pair)
    elif isinstance(node, yaml.SequenceNode):
        size += sum(_size(child, known, above) for child in node.value)
    above.discard(node)
    if size > MAX_NODES:
        raise ValueError(f"line {_line(node)}: more than {MAX_NODES} values")
    known[node] = size
    return size


def _check_keys(node: yaml.MappingNode) -> None:
    seen: set[tuple[str, str]] = set()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise ValueError(f"line {_line(key)}: a key must be text")
        name = (key.tag, str(key.value))
        if name in seen and key.tag != _MERGE:
            raise ValueError(f"line {_line(key)}: the key {key.value!r} appears twice")
        seen.add(name)


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1
