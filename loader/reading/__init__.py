"""How batches are read ahead and moved: the iterator, threads, worker processes, devices."""
