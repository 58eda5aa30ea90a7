"""What to do about a graph break: the text, and the diff where the change is mechanical."""
