"""`reshard.ensure`: a checkpoint in the layout that a run wants, by one call that every rank may make."""

from reshard.ensuring.call import Ensured, Outcome, ensure, ensured

__all__ = ["Ensured", "Outcome", "ensure", "ensured"]
