"""Copy a function, a class, a constant or a flag of one script to those that have the same.

    python tests/twins.py parallel_td.py td_target
    python tests/twins.py parallel_td.py --num-envs

The groups of tests/test_consistency.py say which scripts these are. Nothing else in them changes.
It also says which recipes no longer apply to a script that their heads name. A flag is copied
within the trio.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from conftest import RECIPES, TRIO, path_of
from test_consistency import SOURCES, groups_of


def copy(script, name):
    """Copy a definition to its twins. Return the scripts that changed."""
    changed = []
    [group] = [group for group in groups_of(name) if script in group]
    for other in group:
        old, new = SOURCES[other][name], SOURCES[script][name]
        if old != new:
            before, after = f"\n{path_of(other).read_text()}".split(f"\n{old}\n")
            path_of(other).write_text(f"{before}\n{new}\n{after}"[1:])
            changed.append(other)
    return changed


def applies(patch, script):
    """Try a recipe on a copy of a script, as a user would apply it."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(path_of(script), folder)
        command = ["patch", "-s", "-F0", script, str(patch)]
        return subprocess.run(command, cwd=folder, capture_output=True).returncode == 0


def broken_recipes():
    """Return the recipes that do not apply, each with its script."""
    broken = []
    for patch in sorted(RECIPES.glob("*.patch")):
        made_for = re.search(r"^Made for [^:]*?\.$", patch.read_text(), re.MULTILINE)[0]
        broken += [(patch, x) for x in re.findall(r"\w+\.py", made_for) if not applies(patch, x)]
    return broken


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    script, name = Path(sys.argv[1]).name, sys.argv[2]
    if name not in SOURCES.get(script, {}):
        sys.exit(f"{script} defines no {name} (flags are copied within the trio only)")
    changed = copy(script, name)
    print(f"{name} of {script} was copied to: {', '.join(changed) or 'no script'}")
    if name.startswith("--"):
        lacking = [other for other in TRIO if name not in SOURCES[other]]
        print(f"without {name}, add it by hand: {', '.join(lacking) or 'none'}")
    broken = broken_recipes()
    for patch, target in broken:
        print(f"{patch.name} does not apply to {target}")
    print(
        "all recipes apply" if not broken else ".github/CONTRIBUTING.md says how to mend a recipe"
    )


if __name__ == "__main__":
    main()
