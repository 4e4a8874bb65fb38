"""LatentBE: measurements and figures of the ensemble-distillation study."""
