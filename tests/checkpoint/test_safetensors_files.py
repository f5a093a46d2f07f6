"""Safetensors as the library reads them, their shards, and folders that are refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from titan_loop.checkpoint.safetensors_files import INDEX, SINGLE, SafetensorsFolder, write_folder
from titan_loop.errors import UserError

TENSORS = {
    "a": torch.arange(6.0).view(2, 3),
    "b": torch.arange(4.0),
    "c": torch.tensor(7.0),
    "d": torch.arange(12.0).view(3, 4).T,
}
SHAPES = {name: tuple(tensor.shape) for name, tensor in TENSORS.items()}


def write(folder: Path, most: int, **options: bool) -> dict[str, list[str]]:
    """Write the tensors in fp32; return the names in each file."""
    folder.mkdir()
    write_folder(
        folder, SHAPES, torch.float32, TENSORS.__getitem__, max_shard_bytes=most, **options
    )
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            assert int.from_bytes(path.read_bytes()[:8], "little") % 8 == 0  # they are aligned
            found[path.name] = sorted(file.keys())
    return found


def test_a_file_takes_tensors_up_to_its_limit(tmp_path: Path):
    """They have 24, 16, 4 and 48 bytes."""
    assert write(tmp_path / "one", 92) == {SINGLE: ["a", "b", "c", "d"]}
    assert not (tmp_path / "one" / INDEX).exists()
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert [*write(tmp_path / "three", 40).items()] == [
        (names[0], ["a", "b"]),
        (names[1], ["c"]),
        (names[2], ["d"]),  # more than the limit by itself
    ]
    index = json.loads((tmp_path / "three" / INDEX).read_text())
    assert index["metadata"] == {"total_size": 92}
    assert index["weight_map"] == {"a": names[0], "b": names[0], "c": names[1], "d": names[2]}
    assert [*write(tmp_path / "less", 39).values()] == [["a"], ["b", "c"], ["d"]]
    listed = write(tmp_path / "listed", 92, index=True)
    assert [*listed] == ["model-00001-of-00001.safetensors"]
    for name in ("one", "three", "listed"):
        folder = SafetensorsFolder(tmp_path / name)
        assert [*folder.shapes.items()] == [*SHAPES.items()]
        torch.testing.assert_close({n: folder.read(n) for n in SHAPES}, TENSORS, rtol=0, atol=0)


def test_wider_numbers_are_rounded(tmp_path: Path):
    value = torch.tensor([1 + 2**-8 + 2**-20], dtype=torch.float64)
    shapes: dict[str, tuple[int, ...]] = {"x": (1,)}
    write_folder(tmp_path, shapes, torch.bfloat16, lambda _: value, max_shard_bytes=9)
    assert SafetensorsFolder(tmp_path).read("x").item() == 1 + 2**-7


def change_index(folder: Path, **changed: object) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= changed
    (folder / INDEX).write_text(json.dumps(index))


def test_folders_that_cannot_be_read_are_one_line(tmp_path: Path):
    with pytest.raises(UserError, match=f"has neither {SINGLE} nor {INDEX}"):
        SafetensorsFolder(tmp_path)
    first, *_, last = write(tmp_path / "x", 40)
    change_index(tmp_path / "x", e=first)
    with pytest.raises(UserError, match=rf"{INDEX} and {first} disagree about e; download"):
        SafetensorsFolder(tmp_path / "x")
    (tmp_path / "x" / last).write_bytes((tmp_path / "x" / last).read_bytes()[:-1])
    change_index(tmp_path / "x", e=last)
    with pytest.raises(UserError, match=rf"{last} is damaged or incomplete"):
        SafetensorsFolder(tmp_path / "x")
    (tmp_path / "x" / last).unlink()
    with pytest.raises(UserError, match=rf"{last} is missing; download it, or export again"):
        SafetensorsFolder(tmp_path / "x")
    (tmp_path / "x" / INDEX).write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(UserError, match="it has no weight_map with file names"):
        SafetensorsFolder(tmp_path / "x")
    save_file({"n": torch.arange(3)}, tmp_path / SINGLE)
    with pytest.raises(UserError, match=rf"{SINGLE}: n is I64; only F32, BF16 and F16 weights"):
        SafetensorsFolder(tmp_path)
