"""Sources: files and built-in corpora, read as records."""
