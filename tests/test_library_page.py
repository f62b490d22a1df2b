"""`docs/how-to/library.md`: what it shows is what there is, and does what it says."""

import io
import re
from ast import literal_eval
from contextlib import redirect_stdout
from pathlib import Path

import pytest

import jaxmorph
from jaxmorph.config import check_config

DOCS = Path(__file__).parents[1] / "docs"
PAGE = (DOCS / "how-to" / "library.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def test_planning_prints_what_the_page_says():
    (language, code), (_, said) = BLOCKS[:2]
    assert language == "python"
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code, "library.md", "exec"), {})
    assert printed.getvalue() == said


def test_the_loops_are_the_examples():
    names = ("own_loop.py", "resumed_loop.py")
    examples = [(DOCS / "examples" / name).read_text(encoding="utf-8") for name in names]
    loops = [code for language, code in BLOCKS if "trainer.step" in code]
    for example, loop in zip(examples, loops, strict=True):
        assert all(part in example for part in loop.split("\n\n"))


def test_the_configuration_shown_is_one():
    (shown,) = [code for language, code in BLOCKS if language == "python" and code[0] == "{"]
    config = check_config({**literal_eval(shown), "parallelism": {"stages": 4}})
    assert config.routes.by_link == {"2-3": "delegated"}


def test_every_public_name_is_there_and_no_other():
    assert set(jaxmorph.__all__) <= set(dir(jaxmorph))
    for name in jaxmorph.__all__:
        assert getattr(jaxmorph, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'wombat'"):
        _ = jaxmorph.wombat
