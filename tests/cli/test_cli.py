import jaxmorph


def test_the_version_is_printed(run):
    assert run("--version") == (0, f"jaxmorph {jaxmorph.__version__}\n", "")


def test_without_arguments_the_commands_are_listed(run):
    code, out, _ = run()
    assert code == 0
    assert all(command in out for command in ("plan", "validate", "train", "model", "init"))
