"""Runs a program on a network of virtual hosts, one process a rank, with the environment that torchrun would give it.

    python -m benchmarks.network --hosts 2 --rate 1gbit -- program.py ARGUMENT...
    python -m benchmarks.network --hosts 4 --ranks-per-host 2 --rate 200mbit --torchrun -- -m package.module

Needs root and the package iproute2. The network is gone afterwards, however this ends; the exit code is the program's.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time

from . import Network, NetworkError, ProgramError, exit_on_signals, parse_rate


def say(text: str) -> None:
    # Not to stdout, which is the program's.
    print(f"network: {text}", file=sys.stderr, flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.network", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hosts", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--ranks-per-host", type=int, default=1, metavar="N", help="default: %(default)s")
    parser.add_argument(
        "--rate", default="unlimited", help="of each link and direction: 200mbit, 1gbit, ... (default: %(default)s)"
    )
    parser.add_argument("--delay", type=float, default=0.0, metavar="MS", help="one way, where the kernel has netem")
    parser.add_argument(
        "--congestion-control", default="cubic", metavar="NAME", help="TCP's, on all hosts (default: %(default)s)"
    )
    parser.add_argument("--torchrun", action="store_true", help="start the ranks of each host with torchrun")
    parser.add_argument("--no-check", action="store_true", help="do not measure first what TCP gets from the links")
    parser.add_argument("program", nargs="+", help="a Python file, -m and a module, or a command")
    arguments = parser.parse_args()
    try:
        arguments.rate = parse_rate(arguments.rate)
    except ValueError as error:
        parser.error(str(error))
    return arguments


def main() -> int:
    arguments = parse()
    command = arguments.program
    if command[0].endswith(".py") or command[0] == "-m":
        command = [sys.executable, *command]
    exit_on_signals()
    try:
        with Network(
            arguments.hosts,
            arguments.rate,
            delay_ms=arguments.delay,
            congestion_control=arguments.congestion_control,
        ) as network:
            rates = None if arguments.no_check else network.measure()
            link = f"{network}: {rates or 'not measured'}"
            say(link)
            if rates is not None and not rates.as_asked:
                say("that is not what was asked for; compare results with what TCP gets")
            begin = time.monotonic()
            try:
                network.run(command, arguments.ranks_per_host, torchrun=arguments.torchrun)
            except ProgramError as error:
                say(str(error))
                return error.code if error.code > 0 else 128 - error.code
            say(f"the program took {time.monotonic() - begin:.1f} s; {link}")
            return 0
    except (NetworkError, ValueError) as error:
        say(str(error))
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
