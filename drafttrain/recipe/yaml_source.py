"""YAML into plain values that remember their lines, and `key=value` overrides on top.

Scalars follow YAML 1.2: `off` and `no` are words, `1e-4` is a number, `010` is ten, dates are words. PyYAML's
own rules (YAML 1.1) would turn `wandb: off` into False and `lr: 1e-4` into a string.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from drafttrain.errors import RecipeError
from drafttrain.recipe.problems import KeyPath, Problem, dotted, show

_TAG = "tag:yaml.org,2002:"
_SCALARS = [
    (f"{_TAG}bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    (f"{_TAG}null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    (f"{_TAG}int", r"[-+]?[0-9]+", list("-+0123456789")),
    (
        f"{_TAG}float",
        r"[-+]?(?:(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.inf)|\.nan",
        list("-+0123456789."),
    ),
]


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - yaml's own protocol


class _Dumper(yaml.SafeDumper):
    """Quotes exactly the strings that `_Loader` would take for something else."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - yaml's own protocol

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)  # lists indented below their key


def _integer(loader: Any, node: Any) -> int:
    return int(loader.construct_scalar(node))


for _tag, _pattern, _first in _SCALARS:
    for _side in (_Loader, _Dumper):
        _side.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), _first)
_Loader.add_constructor(f"{_TAG}int", _integer)


@dataclass
class Source:
    """Parsed YAML.

    Attributes:
        name: file name for messages.
        data: the root mapping.
        origins: for each key path, where it was written ("line 12", "override a.b=3").
        problems: duplicate keys, forbidden tags, overrides that do not apply.
    """

    name: str
    data: dict[str, Any] = field(default_factory=dict)
    origins: dict[KeyPath, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def origin(self, path: KeyPath) -> str | None:
        """Where `path`, or the nearest thing around it, was written; None for the root."""
        while path:
            if path in self.origins:
                return self.origins[path]
            path = path[:-1]
        return None


def parse_yaml(text: str, name: str) -> Source:
    """Parse a YAML mapping. Raises RecipeError if it is not YAML; lesser faults become problems."""
    source = Source(name)
    root = _compose(text, name)
    if root is None:
        return source
    if not isinstance(root, yaml.MappingNode):
        raise RecipeError(f"expected keys and values, got {show(_build(root, (), source, ()))}", where=name)
    source.data = _build(root, (), source, ())
    return source


def apply_overrides(source: Source, overrides: Sequence[str], shorthands: Mapping[str, str] | None = None) -> None:
    """Apply `a.b.0.c=value` in order; values are YAML. What does not apply becomes a problem.

    `shorthands` names top-level keys that may hold one string, and the key below them that it stands for.
    """
    for text in overrides:
        key, equals, value_text = text.partition("=")
        path = tuple(key.strip().split("."))
        if not equals or not all(path):
            source.problems.append(Problem((), "an override is written key=value", f"override {text}"))
            continue
        try:
            node = _compose(value_text, f"override {text}")
        except RecipeError as error:
            source.problems.append(Problem(path, error.what, f"override {text}"))
            continue
        part = Source(source.name)
        value = None if node is None else _build(node, (), part, ())
        source.problems += [Problem((*path, *p.path), p.message, f"override {text}") for p in part.problems]
        head = path[0]
        if shorthands and len(path) > 1 and head in shorthands and isinstance(source.data.get(head), str):
            source.data[head] = {shorthands[head]: source.data[head]}
        _assign(source, path, value, f"override {text}")


def dump_yaml(value: Any) -> str:
    """YAML that `parse_yaml` reads back to the same value; keys keep their order."""
    return str(yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100))


def _compose(text: str, name: str) -> yaml.Node | None:
    try:
        return yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = "" if mark is None else f"line {mark.line + 1}: "
        raise RecipeError(f"{line}not valid YAML: {error.problem or error.context}", where=name) from None
    except yaml.reader.ReaderError as error:
        number = text.count("\n", 0, error.position) + 1
        what = f"the character {chr(error.character)!a} cannot stand in YAML"
        raise RecipeError(f"line {number}: not valid YAML: {what}", where=name) from None
    except RecursionError:
        raise RecipeError("not valid YAML: nested too deeply", where=name) from None


def _build(node: yaml.Node, path: KeyPath, source: Source, above: tuple[int, ...]) -> Any:
    """The value of a node; notes the line of every key and list item below it."""

    def fault(at: KeyPath, where: yaml.Node, message: str) -> None:
        source.problems.append(Problem(at, message, f"line {where.start_mark.line + 1}"))

    if id(node) in above:
        fault(path, node, "an alias that contains itself")
        return None
    above = (*above, id(node))
    if isinstance(node, yaml.ScalarNode):
        try:
            return _Loader("").construct_object(node)
        except (yaml.YAMLError, ValueError):
            fault(path, node, f"cannot read {show(node.value)} as {node.tag.removeprefix(_TAG)}")
            return None
    if node.tag not in (f"{_TAG}map", f"{_TAG}seq"):
        fault(path, node, f"the tag {node.tag.replace(_TAG, '!!')} has no meaning here")
        return None
    if isinstance(node, yaml.SequenceNode):
        items = []
        for index, child in enumerate(node.value):
            source.origins[*path, index] = f"line {child.start_mark.line + 1}"
            items.append(_build(child, (*path, index), source, above))
        return items
    assert isinstance(node, yaml.MappingNode)
    mapping: dict[str, Any] = {}
    for key_node, child in node.value:
        if not isinstance(key_node, yaml.ScalarNode):
            fault(path, key_node, "a key must be a word")
            continue
        key = str(key_node.value)
        if key == "<<":
            fault(path, key_node, "merge keys (<<) are of YAML 1.1 and not read: write the keys out")
            continue
        line = f"line {key_node.start_mark.line + 1}"
        if key in mapping:
            first = source.origins[*path, key]
            fault((*path, key), key_node, f"given twice, first on {first}")
            continue
        source.origins[*path, key] = line
        mapping[key] = _build(child, (*path, key), source, above)
    return mapping


def _assign(source: Source, path: tuple[str, ...], value: Any, origin: str) -> None:
    container: Any = source.data
    real: KeyPath = ()

    def fault(message: str) -> None:
        source.problems.append(Problem(real, message, origin))

    for position, key in enumerate(path):
        last = position == len(path) - 1
        if isinstance(container, list):
            if not key.isdecimal() or int(key) >= len(container):
                fault(f"{key!r} is no index of a list of {len(container)}")
                return
            step: str | int = int(key)
        elif isinstance(container, dict):
            step = key
            if not last and container.get(key) is None:
                if path[position + 1].isdecimal():
                    real = (*real, step)
                    fault(f"no list is written there; give it whole: {dotted(real)}=[...]")
                    return
                container[key] = {}
        else:
            fault(f"is the single value {show(container)}, which has no key {key!r}")
            return
        real = (*real, step)
        if last:
            # What was written below the old value is gone.
            for old in [p for p in source.origins if p[: len(real)] == real]:
                del source.origins[old]
            source.origins[real] = origin
            container[step] = value
        else:
            container = container[step]
