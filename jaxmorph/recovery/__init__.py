"""Going on after ranks have failed: whether to start them again, and what that has cost."""
