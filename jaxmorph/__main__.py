"""`python -m jaxmorph` is the `jaxmorph` command."""

from jaxmorph.cli import main

main()
