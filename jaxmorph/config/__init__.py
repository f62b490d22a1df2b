"""A run's configuration as one typed tree.

`load_config` reads and checks a file, `dump_config` writes it back. Read `sections` (and the other
`*_section` files) for the keys and what they mean, `schema` for the whole tree and the rules
between sections, `load` and `overrides` for where values come from, and `problems` for errors.
"""

from jaxmorph.config.load import (
    check_config,
    dump_config,
    load_config,
    override_config,
    read_config,
    read_sections,
)
from jaxmorph.config.overrides import located_error, locating_errors
from jaxmorph.config.schema import Config
from jaxmorph.config.sections import per_stage

__all__ = [
    "Config",
    "check_config",
    "dump_config",
    "load_config",
    "located_error",
    "locating_errors",
    "override_config",
    "per_stage",
    "read_config",
    "read_sections",
]
