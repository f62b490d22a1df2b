from importlib import metadata


def test_the_version_is_that_of_the_installed_package(run):
    assert run("--version") == (0, f"jaxmorph {metadata.version('jaxmorph')}\n", "")


def test_without_arguments_the_commands_are_listed(run):
    code, out, _ = run()
    assert code == 0
    assert all(command in out for command in ("plan", "validate", "train", "model"))
