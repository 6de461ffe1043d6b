"""Numbers of a command line."""

import argparse


def positive(text: str) -> int:
    """A whole number from 1 on."""
    return count(text, least=1)


def count(text: str, least: int = 0) -> int:
    """A whole number from `least` on."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
    return int(text)
