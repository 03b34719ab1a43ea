"""The engine of rackside: everything that works without a screen."""

import warnings

# asyncssh still knows DSA keys, and newer cryptography says so on the operator's terminal at each start.
warnings.filterwarnings("ignore", "DSA is deprecated", module="asyncssh")
