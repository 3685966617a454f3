"""test_snap1.py shares helpers of test_sensitivities.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
