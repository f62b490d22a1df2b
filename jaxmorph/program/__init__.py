"""How each rank runs a schedule: instructions, lowering to them, and a check by replay."""
