"""A bench on a real network: hosts of their own in one machine's namespaces, for root on Linux."""
