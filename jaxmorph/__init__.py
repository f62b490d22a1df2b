"""Pipeline-parallel training in JAX that stays fast when links turn slow or fail."""
