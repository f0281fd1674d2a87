import os
import sys
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: see cpu/ranks.py
os.environ["TORCHDYNAMO_DISABLE"] = "1"  # as the launcher sets it for ranks on CPU

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts"), *(str(ROOT / "tests" / name) for name in ("cpu", "gpu", "unit"))]
