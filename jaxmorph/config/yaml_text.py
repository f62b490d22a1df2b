"""Reads and writes YAML by the core schema of YAML 1.2.

PyYAML follows YAML 1.1, where `1e-3` is text, `off` is false, `010` is eight and `1:30` is ninety.
The reader here knows only the core schema's scalars, and refuses a repeated key. The writer quotes
text that either version would read as something else.
"""

import re
from typing import Any

import yaml
from yaml.composer import ComposerError
from yaml.reader import ReaderError

_TAG = "tag:yaml.org,2002:"
_INTEGER = re.compile(r"^(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)$")
_FLOAT = re.compile(
    r"^(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
    r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
_CORE_SCHEMA = (  # tried in this order, so `12` is an integer before it is a float
    ("null", re.compile(r"^(?:~|null|Null|NULL|)$"), ("~", "n", "N", "")),
    ("bool", re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), tuple("tTfF")),
    ("int", _INTEGER, tuple("-+0123456789")),
    ("float", _FLOAT, tuple("-+.0123456789")),
    ("merge", re.compile(r"^<<$"), ("<",)),
)


class NotYamlError(ValueError):
    """The text is not YAML; the message says where, if known, and why, on one line."""


def parse_yaml(text: str) -> Any:
    """Reads one YAML document as plain dicts, lists and scalars; empty text is None.

    Raises:
        NotYamlError: the text is not one YAML document, or a mapping repeats a key.
    """
    try:
        return yaml.load(text, Loader=_CoreLoader)
    except yaml.MarkedYAMLError as error:
        raise NotYamlError(_where_and_why(error)) from error
    except ReaderError as error:
        raise NotYamlError(f"character #x{error.character:04x} is not allowed in YAML") from error
    except RecursionError as error:
        raise NotYamlError("it is nested too deeply") from error
    except (yaml.YAMLError, ValueError) as error:
        raise NotYamlError(" ".join(str(error).split())) from error


def format_yaml(value: Any, *, one_line: bool = False) -> str:
    """Writes dicts, lists and scalars as YAML that `parse_yaml` reads back to equal values.

    Args:
        value: dicts keep their order; lists are written as `[1, 2]`.
        one_line: write mappings as `{key: value}`, without a line break at the end.
    """
    width = float("inf") if one_line else 100
    text = yaml.dump(
        value, Dumper=_PortableDumper, sort_keys=False, default_flow_style=one_line, width=width
    )
    return " ".join(text.removesuffix("...\n").split()) if one_line else text


def _where_and_why(error: yaml.MarkedYAMLError) -> str:
    why = error.problem or "it cannot be parsed"
    if why.startswith("but "):  # continues the context's sentence
        why = f"{error.context} {why}"
    why = " ".join(why.split())
    mark = error.problem_mark or error.context_mark
    if mark is None:
        return why
    return f"line {mark.line + 1}, column {mark.column + 1}: {why}"


class _CoreLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the core schema's scalars, refusing repeated keys."""

    yaml_implicit_resolvers: dict[str, list] = {}  # noqa: RUF012 (PyYAML fills it below)

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in node.value:
            name = (key.tag, key.value) if isinstance(key, yaml.ScalarNode) else None
            if name in seen:
                problem = f"the key {key.value!r} is there twice"
                raise ComposerError(None, None, problem, key.start_mark)
            seen.update({name} - {None})
        return node


class _PortableDumper(yaml.SafeDumper):
    """PyYAML's safe dumper that also quotes text which only YAML 1.2 reads as a number."""


def _integer(loader: _CoreLoader, node: yaml.ScalarNode) -> int:
    text = loader.construct_scalar(node)
    return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))


def _one_line_list(dumper: _PortableDumper, value: list) -> yaml.SequenceNode:
    return dumper.represent_sequence(_TAG + "seq", value, flow_style=True)


for _name, _pattern, _first_characters in _CORE_SCHEMA:
    _CoreLoader.add_implicit_resolver(_TAG + _name, _pattern, list(_first_characters))
_CoreLoader.add_constructor(_TAG + "int", _integer)
_PortableDumper.add_implicit_resolver(_TAG + "int", _INTEGER, list("-+0123456789"))
_PortableDumper.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))
_PortableDumper.add_representer(list, _one_line_list)
