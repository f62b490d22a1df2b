"""Settings of emulated links: conditions, traces of conditions, and generators of traces."""
