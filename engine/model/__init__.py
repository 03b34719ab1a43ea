"""What should happen: pure functions on numbers and arrays. No I/O, no clock, no asyncio."""
