"""Plain values against a schema: every problem at once, with what was meant where that can be guessed."""

from __future__ import annotations

import json
import types
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from drafttrain.config import Config
from drafttrain.recipe.problems import KeyPath, Problem, closest, dotted, show
from drafttrain.recipe.yaml_source import Source

C = TypeVar("C", bound=Config)

_INVALID = object()
_EXPECTED = {
    "int_type": "an integer",
    "int_parsing": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a string",
    "path_type": "a path",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "keys and values",
    "model_type": "keys and values",
    "model_attributes_type": "keys and values",
    "none_required": "null",
}
_BOUNDS = {
    "greater_than": ("gt", "must be above"),
    "greater_than_equal": ("ge", "must be at least"),
    "less_than": ("lt", "must be below"),
    "less_than_equal": ("le", "must be at most"),
}


@dataclass
class Validated:
    """Outcome of `validate`: everything that is wrong, and the sections that are whole or mended by a guess.

    With problems, the sections are good for further checks only.
    """

    sections: dict[str, Any] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)


def validate(schema: type[Config], source: Source) -> Validated:
    """Check each top-level key of `source.data` by itself, so that one mistake hides no other."""
    result = Validated()
    for key in source.data:
        if key not in schema.model_fields:
            result.problems.append(_unknown_key(schema, source, (key,)))
    for name, info in schema.model_fields.items():
        if name not in source.data:
            if info.is_required():
                result.problems.append(Problem((name,), "missing"))
            else:
                result.sections[name] = info.get_default(call_default_factory=True)
            continue
        annotated: Any = Annotated[info.annotation, info]
        adapter: TypeAdapter[Any] = TypeAdapter(annotated)
        problems, value = _validate_section(schema, adapter, source, name)
        result.problems += problems
        if value is not _INVALID:
            result.sections[name] = value
    return result


def _validate_section(
    schema: type[Config], adapter: TypeAdapter[Any], source: Source, name: str
) -> tuple[list[Problem], Any]:
    """Validate, then mend what can be guessed (misspelt keys and names) and look for what those hid."""
    section = json.loads(json.dumps(source.data[name]))
    found: dict[KeyPath, Problem] = {}
    for _ in range(3):
        try:
            # From JSON and strict: "3" is no number and true is no 1, but a list still makes a tuple.
            value = adapter.validate_json(json.dumps(section), strict=True)
        except ValidationError as error:
            mended = False
            for problem in _explain(schema, source, name, section, error):
                found.setdefault(problem.path, problem)
            for details in error.errors(include_url=False, include_input=False):
                mended |= _mend(schema, name, section, details)
            if not mended:
                break
        else:
            return list(found.values()), value
    return list(found.values()), _INVALID


def _explain(
    schema: type[Config], source: Source, name: str, section: Any, error: ValidationError
) -> Iterator[Problem]:
    expected: dict[KeyPath, list[str]] = defaultdict(list)
    for details in error.errors(include_url=False):
        below = _real_path(section, tuple(details["loc"]), missing=details["type"] == "missing")
        path: KeyPath = (name, *below)
        origin = source.origin(path)
        got = f"got {show(details['input'])}"
        context = details.get("ctx", {})
        match details["type"]:
            case "extra_forbidden":
                yield _unknown_key(schema, source, path)
            case "missing":
                yield Problem(path, "missing", origin)
            case "union_tag_not_found":
                yield Problem((*path, context["discriminator"].strip("'")), "missing", origin)
            case "union_tag_invalid":
                tag, key, known = _tags(context)
                message = f"got {show(tag)}, expected one of {', '.join(known)}{_suggest(tag, known)}"
                yield Problem((*path, key), message, source.origin((*path, key)))
            case "literal_error":
                choices = [choice.strip("'") for choice in context["expected"].replace(" or ", ", ").split(", ")]
                message = f"{got}, expected {context['expected']}"
                yield Problem(path, message + _suggest(details["input"], choices), origin)
            case "value_error" | "assertion_error":
                yield Problem(path, str(context["error"]), origin)
            case kind if kind in _BOUNDS:
                bound, words = _BOUNDS[kind]
                yield Problem(path, f"{got}, {words} {context[bound]:g}", origin)
            case kind if kind in _EXPECTED:
                expected[path].append(_EXPECTED[kind])
            case _:
                yield Problem(path, f"{got}: {details['msg']}", origin)
    for path, kinds in expected.items():
        value = _value_at(section, path[1:])
        message = f"got {show(value)}, expected {' or '.join(dict.fromkeys(kinds))}"
        yield Problem(path, message, source.origin(path))


def _real_path(section: Any, loc: tuple[str | int, ...], missing: bool = False) -> KeyPath:
    """Pydantic's location without the labels of union branches, which are no keys of the recipe."""
    path: list[str | int] = []
    value = section
    for position, step in enumerate(loc):
        if _holds(value, step):
            value = value[step]
        elif missing and position == len(loc) - 1:
            value = None
        else:
            continue
        path.append(step)
    return tuple(path)


def _holds(value: Any, step: str | int) -> bool:
    if isinstance(value, dict):
        return step in value
    return isinstance(value, list) and isinstance(step, int) and step < len(value)


def _value_at(value: Any, path: KeyPath) -> Any:
    for step in path:
        value = value[step]
    return value


def _mend(schema: type[Config], name: str, section: Any, details: ErrorDetails) -> bool:
    """In place: rename a misspelt key, drop an unknown one, correct a misspelt discriminator."""
    path = _real_path(section, tuple(details["loc"]))
    if details["type"] == "extra_forbidden":
        owner = _value_at(section, path[:-1])
        key = str(path[-1])
        meant = closest(key, set(fields_at(schema, {name: section}, (name, *path[:-1]))) - set(owner))
        value = owner.pop(key)
        if meant is not None:
            owner[meant] = value
        return True
    if details["type"] == "union_tag_invalid":
        tag, key, known = _tags(details["ctx"])
        meant = closest(tag, known)
        if meant is not None:
            _value_at(section, path)[key] = meant
            return True
    return False


def _tags(context: dict[str, Any]) -> tuple[str, str, list[str]]:
    """(what was given, the discriminating key, what is known) of a union that did not recognise its tag."""
    known = [tag.strip("'") for tag in context["expected_tags"].split(", ")]
    return str(context["tag"]), context["discriminator"].strip("'"), known


def _suggest(word: Any, known: list[str]) -> str:
    meant = closest(word, known) if isinstance(word, str) else None
    return "" if meant is None else f"; did you mean {meant!r}?"


def _unknown_key(schema: type[Config], source: Source, path: KeyPath) -> Problem:
    key = str(path[-1])
    here = fields_at(schema, source.data, path[:-1])
    meant = closest(key, here)
    if meant is not None:
        hint = f"; did you mean {meant!r}?"
    else:
        elsewhere = [other for other in _all_paths(schema) if other[-1] == key and other[:-1] != path[:-1]]
        hint = "".join(f"; did you mean {dotted(other)!r}?" for other in elsewhere[:1])
        if not hint and here:
            hint = f"; known here: {', '.join(here)}"
    return Problem(path, f"unknown key{hint}", source.origin(path))


def fields_at(schema: type[Config], data: Any, path: KeyPath) -> list[str]:
    """Names of the keys that the schema knows at `path` of `data`."""
    annotation: Any = schema
    for step in path:
        if isinstance(step, int):
            inner = [get_args(a) for a in _members(annotation) if get_origin(a) in (list, tuple)]
            annotation = inner[0][0] if inner and inner[0] else None
            data = data[step] if isinstance(data, list) and step < len(data) else None
        else:
            owners = [m for m in _models(annotation, data) if step in m.model_fields]
            annotation = owners[0].model_fields[step].annotation if owners else None
            data = data.get(step) if isinstance(data, dict) else None
    return list(dict.fromkeys(name for model in _models(annotation, data) for name in model.model_fields))


def _members(annotation: Any) -> list[Any]:
    """The branches of an annotation, without `Annotated` and unions around them."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _members(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return [member for branch in get_args(annotation) for member in _members(branch)]
    return [annotation]


def _models(annotation: Any, data: Any) -> list[type[Config]]:
    """The config classes of an annotation, narrowed by `data` to those whose discriminator fits."""
    models = [m for m in _members(annotation) if isinstance(m, type) and issubclass(m, Config)]
    if isinstance(data, dict) and len(models) > 1:
        shared = set.intersection(*(set(_literals(model)) for model in models))
        fitting = [m for m in models if any(data.get(key) in _literals(m)[key] for key in shared)]
        return fitting or models
    return models


def _literals(model: type[Config]) -> dict[str, tuple[Any, ...]]:
    return {
        name: get_args(info.annotation)
        for name, info in model.model_fields.items()
        if get_origin(info.annotation) is Literal
    }


def _all_paths(schema: type[Config], above: KeyPath = ()) -> Iterator[KeyPath]:
    for name, info in schema.model_fields.items():
        yield (*above, name)
        for model in _models(info.annotation, None):
            yield from _all_paths(model, (*above, name))
