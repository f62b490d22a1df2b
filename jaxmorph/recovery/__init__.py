"""Going on after ranks have failed: whether to start them again, and what that has cost.

`supervisor` starts them again; `ledger` splits the time that each failure has cost.
"""
