"""Parts that several merging methods have in common."""
