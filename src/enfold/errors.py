"""The one exception a user can cause: a sentence with the rule, the value and the remedy."""


class EnfoldError(ValueError):
    """Something the user can mend. Its message names the rule, the offending value and the remedy."""


class MissingExtra(EnfoldError, ImportError):
    """An optional package is needed and not installed."""

    def __init__(self, package: str, extra: str, purpose: str) -> None:
        super().__init__(f"{purpose} needs the package '{package}': install it with  pip install 'enfold[{extra}]'")


class NonFiniteLoss(EnfoldError):
    """Training met a loss that is not a number or infinite."""
