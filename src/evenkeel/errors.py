"""The one error that is the user's to mend, told apart from a bug in the code."""

REFUSED = 2
"""Exit code of a refused input."""


class Refusal(Exception):  # noqa: N818  (a refusal is an answer, not an error of ours)
    """Bad input: one line that names the flag or file, its value and the remedy.

    Main programs print it on stderr as ``evenkeel: <line>`` and exit with :data:`REFUSED`, before any
    process group exists and before anything is written.
    """
