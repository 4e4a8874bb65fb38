"""Out-of-distribution and corrupted data: measurements of the study."""
