"""How the ranks of a run come to run the same plan, and what they are told beside it."""
