"""Measure one table or figure of the papers; the same as `hf-recurrent reproduce`.

python scripts/reproduce.py --help                 # the experiments
python scripts/reproduce.py selective-copying      # small: minutes on two cores
"""

import sys

from hf_recurrent.cli.main import main

if __name__ == "__main__":  # rows that run side by side start as processes that import this file
    main(["reproduce", *sys.argv[1:]])
