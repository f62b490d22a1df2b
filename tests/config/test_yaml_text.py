import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from jaxmorph.config.yaml_text import NotYamlError, format_yaml, parse_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("2E5", 2e5),
        (".5", 0.5),
        ("-1.", -1.0),
        ("010", 10),
        ("0x1f", 31),
        ("0o17", 15),
        ("-7", -7),
        ("1_000", "1_000"),
        ("1:30", "1:30"),
        ("off", "off"),
        ("no", "no"),
        ("2024-01-01", "2024-01-01"),
        ("true", True),
        ("", None),
        ("~", None),
        ("'12'", "12"),
        ("1f1b", "1f1b"),
        ("e3", "e3"),
    ],
)
def test_scalars_follow_the_core_schema(text, value):
    parsed = parse_yaml(text)
    assert (parsed, type(parsed)) == (value, type(value))


def test_a_merge_key_may_repeat_what_it_overrides():
    assert parse_yaml("base: &b {x: 1}\nmore: {<<: *b, x: 2}")["more"] == {"x": 2}


def test_a_repeated_key_is_refused_wherever_it_is():
    with pytest.raises(NotYamlError, match="line 1, column 15: the key 'x' is there twice"):
        parse_yaml("a: [1, {x: 1, x: 2}]")
    assert parse_yaml("{x: 1, y: {x: 1}}") == {"x": 1, "y": {"x": 1}}


_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(10**12), 10**12)
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]))
    | st.sampled_from(["1e-3", "off", "0o17", "010", "1:30", "~", "<<", "=", "2024-01-01", ".inf"])
)
_TREES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner) | st.dictionaries(st.text("ab1.", max_size=3), inner),
    max_leaves=30,
)


@given(_TREES, st.booleans())
def test_what_is_written_reads_back_the_same(tree, one_line):
    assert parse_yaml(format_yaml(tree, one_line=one_line)) == tree


@given(_SCALARS)
def test_text_is_still_text_for_readers_of_yaml_1_1(value):
    read = yaml.safe_load(format_yaml({"key": value}))["key"]
    assert isinstance(read, str) == isinstance(value, str)
