"""The run as one typed tree: `load_config` reads and checks it, `dump_config` writes it back."""

from jaxmorph.config.load import check_config, dump_config, load_config, read_config
from jaxmorph.config.overrides import placed_error, placing_errors
from jaxmorph.config.schema import Config
from jaxmorph.config.sections import per_stage

__all__ = [
    "Config",
    "check_config",
    "dump_config",
    "load_config",
    "per_stage",
    "placed_error",
    "placing_errors",
    "read_config",
]
