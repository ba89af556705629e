"""Shows the numbers of a run: a curve, tables of evaluations, TensorBoard and other services."""
