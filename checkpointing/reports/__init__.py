"""Reports on a run directory: inspection, and the provenance of its steps."""
