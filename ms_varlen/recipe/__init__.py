"""Recipes: YAML files, their sections, and the rules between keys."""
