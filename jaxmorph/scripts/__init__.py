"""Training from a script of the user's own: how its processes start, meet and end."""
