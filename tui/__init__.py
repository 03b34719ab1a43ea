"""The screen of rackside. Holds one engine object, engine.control.Control, and draws what it publishes."""
