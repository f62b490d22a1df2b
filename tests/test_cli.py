from importlib import metadata

import pytest

from jaxmorph import cli


def test_the_version_is_that_of_the_installed_package(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"jaxmorph {metadata.version('jaxmorph')}\n"


def test_without_arguments_the_commands_are_listed(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([])
    assert exit_info.value.code == 0
    out = capsys.readouterr().out
    assert all(command in out for command in ("plan", "validate", "train", "model"))
