"""What rooms hand one another as plain values; it imports nothing of jaxmorph."""

from typing import Any

Message = dict[str, Any]
"""What a rank or a process tells another, as JSON has it."""
