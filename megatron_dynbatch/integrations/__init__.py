"""What other trainers on rollouts know, under their names; nothing else of this package needs it.

The names are also where they were first: in `plan`, `hooks` and `report`.
"""
