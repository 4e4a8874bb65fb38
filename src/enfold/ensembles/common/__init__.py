"""Parts that several ensemble methods have in common."""
