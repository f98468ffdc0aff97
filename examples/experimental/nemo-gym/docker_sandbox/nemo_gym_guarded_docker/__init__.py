"""NeMo Gym's docker sandbox provider, with an engine's failures told from a command's.

``record`` judges what the engine says about a command; ``provider`` asks it and is what NeMo Gym loads.
"""
