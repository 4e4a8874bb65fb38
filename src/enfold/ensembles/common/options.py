"""Types of options that several methods have, with their limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

Fraction = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
