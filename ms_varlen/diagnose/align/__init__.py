"""Train two layouts of the same samples side by side and compare them number by number."""
