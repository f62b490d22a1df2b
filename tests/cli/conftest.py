"""Runs commands in this process."""

import pytest

from jaxmorph.cli.app import main


@pytest.fixture
def run(capsys):
    """Runs a command; returns its exit code, standard output and standard error."""

    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            main([*map(str, words)])
        output = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        return ended.value.code, output.out, output.err

    return run


@pytest.fixture
def expect_mistake(run):
    """Runs a command that ends with exit code 2 and one line that begins with a message."""

    def expect_mistake(message, *words: object):
        code, out, err = run(*words)
        assert (code, out) == (2, "")
        assert err.startswith(f"error: {message}")
        assert err.count("\n") == 1

    return expect_mistake
