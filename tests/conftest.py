"""Let the tests import the scripts, which stand one folder up."""
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))
