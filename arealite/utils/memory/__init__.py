"""How much memory a model needs, from its sizes: formulas without torch."""
