"""What the tools of a node print, as values: text in, readings out."""
