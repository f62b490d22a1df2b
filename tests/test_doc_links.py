"""README and docs: whatever they link to, name as a file, or say that a test holds, is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])

_CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
_FILE = re.compile(r"`((?:benchmarks|configs|docs|jaxmorph|models|tests)/[\w./-]+\.\w+)`")


def _text(page):
    return _CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))


def _anchors(page):
    """The headings' names in addresses, as GitHub makes them."""
    headings = (heading.lower().replace("`", "") for heading in _HEADING.findall(_text(page)))
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in headings}


def _is_dead(page, target):
    file, _, anchor = target.partition("#")
    linked = page.parent / file if file else page
    return not linked.exists() or bool(anchor and anchor not in _anchors(linked))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(page):
    targets = [target for target in _LINK.findall(_text(page)) if "://" not in target]
    assert [target for target in targets if _is_dead(page, target)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_file_that_is_named_is_there(page):
    assert [path for path in _FILE.findall(_text(page)) if not (ROOT / path).exists()] == []


def test_a_test_holds_each_row_of_the_table_of_faults():
    page = (ROOT / "docs/how-to/recover.md").read_text(encoding="utf-8")
    section = page.partition("## How a run ends\n")[2]
    rows = re.findall(r"^\| (.*?) (?<!\\)\| ", section, re.MULTILINE)[1:]
    held = re.findall(r"^(.+): (tests/\S+\.py)::(\w+)$", section, re.MULTILINE)
    assert [fault.replace("\\|", "|") for fault in rows] == [fault for fault, *_ in held]
    for _, path, test in held:
        assert f"def {test}(" in (ROOT / path).read_text(encoding="utf-8"), (path, test)
