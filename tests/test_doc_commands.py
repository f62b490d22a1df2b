"""README and docs: every command parses, quick ones run, and code and output are what they say.

A block of commands runs here, or a comment above it says why not: `<!-- not run: REASON -->`. After
`not run here: the test of whole runs does` it runs with the others of its kind, on one short run.
"""

import io
import re
import shlex
import subprocess
from ast import literal_eval
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

import jaxmorph
from jaxmorph.cli.app import app, main
from jaxmorph.config import check_config, load_config
from tests.command_reference import PAGE, command_tables, with_command_tables

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([ROOT / "README.md", *DOCS.glob("*.md"), *DOCS.glob("*/*.md")])

QUICK = ("plan", "validate", "model", "trace", "doctor")
CONFIGURED = ("train", "compare")
OVERRIDING = (*CONFIGURED, "replay")
ON_A_RUN = "the test of whole runs does"
SHELL = ("sh", "bash", "console", "")

_BLOCK = re.compile(
    r"(?:^<!-- not run(?P<why>.*?) -->\n)?^```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_INLINE = re.compile(r"(?<!`)`((?:jaxmorph|make|python -m benchmarks)[ .][^`\n]*)`(?!`)")


@dataclass(frozen=True)
class Command:
    """One command line of a page, and the output that the page shows for it."""

    line: str
    said: tuple[str, ...] = ()

    @property
    def words(self) -> list[str]:
        return shlex.split(self.line, comments=True)

    @property
    def ours(self) -> list[str]:
        """The words after `jaxmorph`, also where a launcher starts it."""
        words = self.words
        return words[words.index("jaxmorph") + 1 :] if "jaxmorph" in words else []

    @property
    def verb(self) -> str:
        return next(iter(self.ours), "")

    @property
    def is_ours(self) -> bool:
        return bool(self.ours) and "$" not in self.line and "--help" not in self.ours


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    why: str | None

    @property
    def commands(self) -> list[Command]:
        if self.language not in SHELL:
            return []
        lines = self.text.replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):
            return _with_output(lines)
        return [Command(line) for line in lines if line and not line.startswith("#")]

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def _with_output(lines):
    starts = [at for at, line in enumerate(lines) if line.startswith("$ ")]
    ends = [*starts[1:], len(lines)]
    return [
        Command(lines[at][2:], tuple(lines[at + 1 : end]))
        for at, end in zip(starts, ends, strict=True)
    ]


def blocks_of(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text[: match.start()].count("\n") + 1, match["language"], match["text"],
              match["why"])
        for match in _BLOCK.finditer(text)
    ]  # fmt: skip


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
COMMANDS = [block for block in BLOCKS if any(command.is_ours for command in block.commands)]


def of_blocks(blocks):
    return pytest.mark.parametrize("block", blocks, ids=str)


def parse(words):
    """Has the command line parsed, and its parameters checked, without calling the command."""
    group = typer.main.get_command(app)
    verb, *arguments = words
    command = group.get_command(None, verb)  # pyright: ignore[reportAttributeAccessIssue]
    assert command is not None, f"jaxmorph has no command {verb}"
    return command.make_context(verb, arguments).params


def check_configuration(verb, parameters, folder, has_init):
    config, overrides = parameters.get("config"), list(parameters.get("overrides") or [])
    if verb == "replay" or parameters.get("resume") not in (None, "auto"):
        overrides += [config] if config is not None else []
        load_config(ROOT / "configs/demo.yaml", overrides)
        return
    path = folder / str(config)
    if has_init and not path.exists():
        path = ROOT / "configs/demo.yaml"
    with chdir(ROOT):
        load_config(path, overrides)


@of_blocks(COMMANDS)
def test_every_command_line_parses(block):
    folder = ROOT
    for command in block.commands:
        words = command.words
        if words[:1] == ["cd"]:
            folder /= words[1]
        if command.is_ours:
            parameters = parse(command.ours)
            if command.verb in OVERRIDING:
                has_init = "jaxmorph init" in block.text
                check_configuration(command.verb, parameters, folder, has_init)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_command_that_is_named_is_there(page):
    """In prose too: subcommands, targets of make, and benchmarks."""
    text = page.read_text(encoding="utf-8")
    named = [*_INLINE.findall(re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))]
    named += [command.line for block in blocks_of(page) for command in block.commands]
    assert [line for line in named if not _is_there(line)] == []


def _is_there(line):
    verbs = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    if found := re.match(r"jaxmorph ([a-z]\w*)", line):
        return found[1] in verbs
    if found := re.match(r"make ([a-z][\w-]*)", line):
        makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
        return re.search(rf"^{found[1]}:", makefile, re.MULTILINE) is not None
    if found := re.match(r"(?:\S*/)?python -m (benchmarks[\w.]*)", line):
        path = ROOT / found[1].replace(".", "/")
        return path.with_suffix(".py").exists() or (path / "__main__.py").exists()
    return True


@of_blocks([block for block in BLOCKS if block.commands and block.page.is_relative_to(DOCS)])
def test_a_block_runs_or_says_why_not(block):
    if block.why is None:
        runs = {*QUICK, "train"}
        assert [
            command.line
            for command in block.commands
            if command.verb not in runs and not command.line.startswith(("cd ", "echo "))
        ] == []


def run(words, folder):
    """The exit code and the output of a command in this process, but for that of its ranks."""
    said = io.StringIO()
    out, err = redirect_stdout(said), redirect_stderr(said)
    with chdir(folder), out, err, pytest.raises(SystemExit) as ended:
        main(words)
    return ended.value.code, said.getvalue()


def is_as_shown(said, shown):
    """Whether some output is what a page shows, in which `...` stands for any lines."""
    special = {"...": r"(?:.*\n)*", "planning": r"planning +[\d.]+ ms\n"}
    patterns = [
        special[word] if (word := line.split(" ")[0]) in special else re.escape(line) + r" *\n"
        for line in shown
    ]
    return re.fullmatch("".join(patterns), said.rstrip("\n") + "\n") is not None


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    (tmp_path / "stuck.csv").write_text("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n")
    return tmp_path


def has_quick_ones(block):
    return block.why is None and any(command.verb in QUICK for command in block.commands)


@of_blocks([block for block in COMMANDS if has_quick_ones(block)])
def test_quick_commands_do_what_the_page_shows(block, folder):
    for command in block.commands:
        if command.words[0] == "echo":
            subprocess.run(["bash", "-c", command.line], cwd=folder, check=True)
        if command.verb in QUICK and command.is_ours:
            code, said = run(command.ours, folder)
            assert code == (2 if "deadlock" in "".join(command.said) else 0), said
            assert not command.said or is_as_shown(said, command.said), said


@pytest.mark.long
@of_blocks([
    block for block in COMMANDS
    if block.why is None and any(command.verb == "train" for command in block.commands)
])  # fmt: skip
def test_training_commands_can_begin(block, monkeypatch):
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # as it would stay set
    folder = ROOT
    for command in block.commands:
        if command.words[0] == "cd":
            folder /= command.words[1]
        if command.verb == "train" and (folder / command.ours[1]).exists():
            words = [word for word in command.ours if word != "--dry-run"]
            code, said = run([*words, "--dry-run"], folder)
            assert code == 0, said
            assert not command.said or is_as_shown(said, command.said), said


@pytest.mark.long
@pytest.mark.multiprocess
def test_commands_on_a_finished_run(tmp_path):
    code, said = run(
        ["train", str(ROOT / "configs/demo.yaml"), "run.steps=4", "run.dir=runs/demo",
         "checkpoint.every_steps=2", "emulation.accelerator=null", "parallelism.stages=2"],
        tmp_path,
    )  # fmt: skip
    assert code == 0, said
    (tmp_path / "runs/slow-link").symlink_to("demo")
    of_this_size = {
        "run.steps=200": "run.steps=6", "40": "4", "200": "20", "link=2:0ms": "link=0:0ms"
    }  # fmt: skip
    blocks = [block for block in BLOCKS if ON_A_RUN in (block.why or "")]
    lines = {tuple(command.ours): command.line for block in blocks for command in block.commands}
    assert {verb for verb, *_ in lines} >= {"report", "sample", "export", "train", "replay"}
    for words, line in lines.items():
        code, said = run([of_this_size.get(word, word) for word in words], tmp_path)
        assert code == 0, (line, said)


LIBRARY = blocks_of(DOCS / "how-to" / "library.md")


def test_planning_from_python_prints_what_the_page_shows():
    code, shown = LIBRARY[:2]
    assert (code.language, shown.language) == ("python", "text")
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(code.text, "library.md", "exec"), {})
    assert printed.getvalue() == shown.text


def test_the_loops_are_the_examples():
    names = ("own_loop.py", "resumed_loop.py")
    examples = [(DOCS / "examples" / name).read_text(encoding="utf-8") for name in names]
    loops = [block.text for block in LIBRARY if "metrics = trainer.step" in block.text]
    for example, loop in zip(examples, loops, strict=True):
        assert all(part in example for part in loop.split("\n\n"))


def test_the_configuration_shown_is_one():
    (shown,) = [block.text for block in LIBRARY if block.text.startswith("{")]
    config = check_config({**literal_eval(shown), "parallelism": {"stages": 4}})
    assert config.routes.by_link == {"2-3": "delegated"}


def test_every_public_name_is_there_and_no_other():
    assert set(jaxmorph.__all__) <= set(dir(jaxmorph))
    for name in jaxmorph.__all__:
        assert getattr(jaxmorph, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'wombat'"):
        _ = jaxmorph.wombat


def test_the_reference_page_has_every_command_as_it_is():
    page = PAGE.read_text(encoding="utf-8")
    assert with_command_tables(page) == page, "make reference writes the page again"
    verbs = typer.main.get_command(app).commands  # pyright: ignore[reportAttributeAccessIssue]
    assert re.findall(r"^## jaxmorph (\w+)$", page, re.MULTILINE) == list(verbs)


def test_every_option_says_what_it_is():
    rows = [line for line in command_tables().splitlines() if line.startswith("| `")]
    assert len(rows) > 60
    assert [row for row in rows if row.endswith("|  |")] == []
