"""Drives core through the ports: asyncio, one task per effect, every failure an event."""
