"""Which replica serves which request, and when: plain data and a pure policy. No Ray, no clock, no asyncio."""
