"""Nothing is shared by all tests but this: subprocesses of tests never look for the network."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
