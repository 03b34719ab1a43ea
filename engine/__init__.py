"""The engine of rackside: everything that works without a screen."""
