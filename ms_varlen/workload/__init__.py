"""A recipe on a corpus: plan, shapes and layout, before any graph exists."""
