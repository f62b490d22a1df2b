"""Command-line overrides, `section.key=value`, with the value read as YAML."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxmorph.config.problems import printable
from jaxmorph.config.yaml_text import NotYamlError, parse_yaml
from jaxmorph.errors import UserError


@dataclass(frozen=True)
class Override:
    """One override: its text as typed, the dotted key and the value that replaces the key's."""

    text: str
    key: str
    value: Any

    @classmethod
    def parse(cls, text: str) -> "Override":
        """Reads `section.key=value`.

        Args:
            text: the override as typed; an empty value is null.

        Returns:
            The override.

        Raises:
            UserError: there is no key, no `=`, or the value is not YAML.
        """
        key, equals, value = text.partition("=")
        key = key.strip()
        if not equals or not all(key.split(".")):
            raise UserError(f"{as_typed(text)}: expected section.key=value")
        try:
            return cls(text, key, parse_yaml(value))
        except NotYamlError as error:
            raise UserError(f"{as_typed(text)}: the value is not YAML: {error}") from error


def as_typed(text: str) -> str:
    """An override as errors name it, on one line."""
    line = printable(text)
    return f"{line if len(line) <= 100 else line[:97] + '...'} (command line)"


def apply_overrides(tree: Mapping[str, Any], overrides: Sequence[Override]) -> dict[str, Any]:
    """Returns the tree with each override's value in its place, the last one winning.

    A number in a key is one of a list: `emulation.links.0.latency_ms`.
    """
    result = dict(tree)
    for override in overrides:
        result = _with_value(result, override.key.split("."), override.value)
    return result


def _with_value(tree: Any, keys: Sequence[str], value: Any) -> Any:
    """The tree with a value put in; what is in the way and can't hold the next key is replaced."""
    if not keys:
        return value
    first, *rest = keys
    if isinstance(tree, list) and first.isdecimal() and int(first) < len(tree):
        at = int(first)
        return [*tree[:at], _with_value(tree[at], rest, value), *tree[at + 1 :]]
    under = tree if isinstance(tree, Mapping) else {}
    return {**under, first: _with_value(under.get(first), rest, value)}
