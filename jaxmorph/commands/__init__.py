"""What the commands beside `train` and `compare` do: from their options to what they print."""
