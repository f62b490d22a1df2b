"""What `jaxmorph doctor` finds out: `host` without JAX, `accelerators` of what JAX computes on."""
