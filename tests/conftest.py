"""Settings for every test: JAX on the CPU and strict, Hypothesis without deadlines."""

import os

# In the environment rather than through jax.config: JAX reads it when it is first imported, so
# this imports nothing, starts no backend, and holds in the subprocesses that tests start too.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ["JAX_NUMPY_RANK_PROMOTION"] = "raise"

from hypothesis import HealthCheck, settings

# The time of one example says more about the machine's load than about the code.
settings.register_profile("dev", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples every time: a change is judged by what it did, not by which examples came up.
settings.register_profile("ci", settings.get_profile("dev"), derandomize=True, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "dev"))
