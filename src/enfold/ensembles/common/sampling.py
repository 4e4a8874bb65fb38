"""Names of the first edition for methods that are not converted yet."""

from enfold.ensembles.common.sampled import SampledEnsemble as Sampled  # noqa: F401
