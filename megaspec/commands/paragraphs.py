"""How --help prints descriptions of several paragraphs."""

import argparse


class Paragraphs(argparse.HelpFormatter):
    """Wraps each paragraph for itself; argparse makes one of them all."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = []
        for paragraph in text.split("\n\n"):
            paragraphs.append(super()._fill_text(paragraph, width, indent))
        return "\n\n".join(paragraphs)
