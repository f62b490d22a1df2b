"""`python -m jaxmorph` is the `jaxmorph` command."""

from jaxmorph.cli.app import main

main()
