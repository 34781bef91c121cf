"""A network of virtual hosts on this machine, with links of a chosen rate, for tests and benchmarks. See network.py."""

from .links import UNLIMITED, NetworkError, parse_rate, rate_name
from .network import Network, Rates, missing
from .program import Program, ProgramError, exit_on_signals

__all__ = [
    "UNLIMITED",
    "Network",
    "NetworkError",
    "Program",
    "ProgramError",
    "Rates",
    "exit_on_signals",
    "missing",
    "parse_rate",
    "rate_name",
]
