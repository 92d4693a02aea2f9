"""Python imports this at its start where PYTHONPATH names its folder: `inherit` of facade.py lets children find it."""

import importlib.machinery
import importlib.util
import os
import sys

from hf_zero.extras.deepspeed.facade import as_deepspeed

# The environment may have a file of this name too, which this one hides.
sys.path[:] = [path for path in sys.path if os.path.abspath(path) != os.path.dirname(os.path.abspath(__file__))]
_hidden = importlib.machinery.PathFinder.find_spec("sitecustomize")
if _hidden is not None and _hidden.loader is not None:
    sys.modules["sitecustomize"] = _module = importlib.util.module_from_spec(_hidden)
    _hidden.loader.exec_module(_module)

as_deepspeed()
