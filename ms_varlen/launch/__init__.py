"""Start, watch and stop the ranks of a recipe under msrun."""
