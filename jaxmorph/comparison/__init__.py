"""What `jaxmorph compare` is made of: systems, conditions of links, and rounds of steps."""
