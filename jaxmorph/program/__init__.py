"""How each rank runs a schedule: instructions, the pass that makes them, the check that replays them."""
