"""Share: M members held in less space than M networks. One file is one method."""

from enfold.share.batch_ensemble import BatchEnsemble

__all__ = ["BatchEnsemble"]
