"""Where steps are kept: the contract of a storage, a local disk, an object store."""
