"""The README as a package index shows it, without pictures and links that only a clone has."""

import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface  # pyright: ignore[reportMissingImports]

_RELATIVE = r"\((?!https?:|#)[^)]*\)"


class CustomMetadataHook(MetadataHookInterface):
    """Adds the long description."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Leave out relative pictures, and of relative links all but their texts."""
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        text = re.sub(rf"!\[[^\]]*\]{_RELATIVE}\n*", "", text)
        text = re.sub(rf"\[([^\]]+)\]{_RELATIVE}", r"\1", text)
        metadata["readme"] = {"content-type": "text/markdown", "text": text}
