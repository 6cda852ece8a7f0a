"""Folders that are whole or not there: a manifest with checksums, written last.

The manifest is what commits a folder. One without, or one whose files differ
from it, was not finished or was damaged since, and is never read. This needs no
atomic renaming of folders, which buckets do not have.
"""

import hashlib
import json
import os
from collections.abc import Iterator

from etils import epath

MANIFEST = "MANIFEST.json"
_READ_BYTES = 2**20


def seal(folder: epath.Path) -> int:
  """Commits what is in ``folder``.

  Returns:
    Bytes of its files.

  Raises:
    OSError: They could not be read back, or the manifest not be written.
  """
  files = {}
  for path in _files(folder):
    _sync(path)
    files[_name(path, folder)] = {
      "bytes": path.stat().length,
      "sha256": _digest(path),
    }
  text = json.dumps(files, sort_keys=True)
  manifest = {"files": files, "sha256": _digest_of(text)}
  # In a file of its own first: a manifest that was cut short must not be found.
  temporary = folder / f".{MANIFEST}"
  temporary.write_text(json.dumps(manifest))
  _sync(temporary)
  temporary.rename(folder / MANIFEST)
  return sum(file["bytes"] for file in files.values())


def is_sealed(folder: epath.Path) -> bool:
  """Whether it was committed; ``damage`` says whether it is whole since."""
  return (folder / MANIFEST).exists()


def damage(folder: epath.Path) -> str | None:
  """What is wrong with a folder that was sealed; None if it is whole."""
  try:
    manifest = json.loads((folder / MANIFEST).read_text())
    files = manifest["files"]
    if _digest_of(json.dumps(files, sort_keys=True)) != manifest["sha256"]:
      return f"{MANIFEST} does not match its own checksum"
    for name, expected in files.items():
      path = folder / name
      if not path.exists():
        return f"{name} is missing"
      if (length := path.stat().length) != expected["bytes"]:
        return f"{name} has {length:,} bytes instead of {expected['bytes']:,}"
      if _digest(path) != expected["sha256"]:
        return f"{name} does not match its checksum"
  except OSError as error:
    return f"{type(error).__name__}: {error}"
  except (ValueError, KeyError, TypeError, AttributeError):
    return f"{MANIFEST} is not as it was written"
  return None


def remove(folder: epath.Path) -> None:
  """Deletes a folder, which is not sealed from the first moment on."""
  (folder / MANIFEST).unlink(missing_ok=True)
  folder.rmtree()


def _files(folder: epath.Path) -> Iterator[epath.Path]:
  for path in sorted(folder.iterdir()):
    if path.is_dir():
      yield from _files(path)
    elif path.name.lstrip(".") != MANIFEST:
      yield path


def _name(path: epath.Path, folder: epath.Path) -> str:
  return str(path.relative_to(folder))


def _digest(path: epath.Path) -> str:
  digest = hashlib.sha256()
  with path.open("rb") as file:
    while block := file.read(_READ_BYTES):
      digest.update(block)
  return digest.hexdigest()


def _digest_of(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()


def _sync(path: epath.Path) -> None:
  """On a disk of this machine: past its cache, should the power fail."""
  name = os.fspath(path)
  if "://" in name:
    return
  handle = os.open(name, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)
