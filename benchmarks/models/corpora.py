"""Where the measured runs of others lie: folders that NCCLSCOPE_CORPUS names."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def folder(name: str) -> Path:
    """The folder of this name in one of the corpora; ends the program, with a reason, where there is none."""
    corpora = [Path(each) for each in os.environ.get("NCCLSCOPE_CORPUS", "").split(os.pathsep) if each]
    for corpus in corpora:
        if (corpus / name).is_dir():
            return corpus / name
    sys.exit(f"no folder {name!r} in NCCLSCOPE_CORPUS ({os.pathsep.join(map(str, corpora)) or 'not set'})")
