"""`reshard.ensure`: one call, safe on every rank, that returns a checkpoint in the layout that a run needs."""

from reshard.ensuring.call import Ensured, Outcome, direct, ensure, ensured

__all__ = ["Ensured", "Outcome", "direct", "ensure", "ensured"]
