"""Scripts after a change that is written as a diff, as in README.md."""

from pathlib import Path

ROOT = Path(__file__).parent.parent


def changed_text(script, *diffs):
    """The text of a script after diffs, whose hunks are separated by blank lines.

    In a hunk, lines that begin with a blank or "-" are found in the script, all together and once.
    Those that begin with a blank or "+" take their place.
    """
    text = (ROOT / script).read_text()
    for hunk in "\n\n".join(diff.strip("\n") for diff in diffs if diff).split("\n\n"):
        old = "".join(line[1:] + "\n" for line in hunk.splitlines() if line[0] in " -")
        new = "".join(line[1:] + "\n" for line in hunk.splitlines() if line[0] in " +")
        if hunk:
            assert text.count(old) == 1, f"{script} has {text.count(old)} times:\n{old}"
            text = text.replace(old, new)
    return text
