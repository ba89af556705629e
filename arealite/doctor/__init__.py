"""Why a run hangs, is slow or has died, and what to do: `arealite doctor RUN_DIR`.

`collect` reads, `rules` judge, `report` prints. Nothing of the run is changed.
"""
