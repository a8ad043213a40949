"""Stand-ins and fault injection for tests; nothing in the package imports this."""
