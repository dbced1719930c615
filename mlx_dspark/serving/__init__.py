"""The HTTP server: one stream of events from the engine, and dialects that translate it."""
