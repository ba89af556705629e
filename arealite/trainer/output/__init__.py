"""Where the numbers of a run are shown: a curve, tables of evaluations, TensorBoard and other services."""
