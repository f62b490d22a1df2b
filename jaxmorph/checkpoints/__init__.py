"""What a run saves of itself, so that it can go on: files, commits and when they are made."""
