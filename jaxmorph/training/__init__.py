"""What a training run is made of, from its start to its record."""
