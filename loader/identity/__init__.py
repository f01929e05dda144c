"""The identity of data and transforms: digests, fingerprints, and differences in words."""
