"""Report: tables and figures from stored results; nothing here computes a metric."""
